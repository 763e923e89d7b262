"""Several routers, each with an index and a ledger of its own: what their disagreement costs."""

import argparse
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
from benchmarks.simulate.plots import check_plots, plot_runs
from benchmarks.simulate.report import as_table, remarks, summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--counts", default="1,2,4,8", help="of routers")


def run(words: argparse.Namespace) -> Mapping[str, Any]:
    if words.plots:
        check_plots(words.plots)
    bench = Bench(device_of(words), objective_of(words))
    plan = plan_of(words)
    requests = source_of(words).requests(words.speed)
    runs = {}
    for count in parse_numbers("counts", words.counts):
        name = f"{count} router{'s' * (count > 1)}"
        runs[name] = bench.run(replace(plan, num_routers=count), requests)
        print(summary(name, runs[name][1]), flush=True)
    rows = {name: figures for name, (_, figures) in runs.items()}
    print(f"\n{plan.name}, {len(requests):,} requests\n\n{as_table(rows)}")
    print("\n".join(remarks(rows)))
    if words.plots:
        plot_runs({name: one for name, (one, _) in runs.items()}, words.plots)
    return {name: figures.as_json() for name, figures in rows.items()}
