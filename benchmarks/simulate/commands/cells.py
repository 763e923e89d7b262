"""Many workers in cells, each with its own router, beside one router for all of them."""

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.simulate.arguments import (
    device_of,
    objective_of,
    parse_numbers,
    plan_of,
    source_of,
)
from benchmarks.simulate.bench import Bench
from benchmarks.simulate.report import as_table, remarks, summary
from engine.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--counts", default="16,1", help="of cells; 1 is a global router")


def run(words: argparse.Namespace) -> Mapping[str, Any]:
    """`--prefill` and `--decode` say the ratio of the two."""
    bench = Bench(device_of(words), objective_of(words))
    plan = plan_of(words)
    requests = source_of(words).requests(words.speed)
    rows = {}
    for count in parse_numbers("counts", words.counts):
        size = words.workers // count
        num_prefill = round(size * plan.num_prefill / (plan.num_prefill + plan.num_decode))
        if not 0 < num_prefill < size:
            raise ConfigError(
                "counts",
                f"{count}: of {words.workers} workers a cell has {num_prefill} prefill and "
                f"{size - num_prefill} decode workers, must be at least 1 of each",
            )
        cell = replace(
            plan, num_cells=count, num_prefill=num_prefill, num_decode=size - num_prefill
        )
        began = time.perf_counter()
        name = f"{count} cell{'s' * (count > 1)} of {size}"
        _, rows[name] = bench.run(cell, requests)
        took_s = time.perf_counter() - began
        print(f"{summary(name, rows[name])}; took {took_s:.0f} s", flush=True)
    print(f"\n{len(requests):,} requests\n\n{as_table(rows)}")
    print("\n".join(remarks(rows)))
    return {name: figures.as_json() for name, figures in rows.items()}
