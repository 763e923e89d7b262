"""Policies at one load.

`--ideal` takes the assumptions of `equal.py`, for which the policies of `plain.py` are made.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.simulate.arguments import (
    ALL_POLICIES,
    device_of,
    objective_of,
    plan_of,
    source_of,
)
from benchmarks.simulate.bench import Bench
from benchmarks.simulate.equal import SPEED, equal_device, equal_plan
from benchmarks.simulate.plain import PLAIN_POLICIES
from benchmarks.simulate.plots import check_plots, plot_runs
from benchmarks.simulate.report import as_table, remarks, summary
from router.policies import POLICIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", action="append", choices=ALL_POLICIES, help="may be repeated; default: all"
    )
    parser.add_argument(
        "--ideal",
        action="store_true",
        help=f"prefill queues alone, at speed {SPEED} unless another is asked for",
    )


def run(words: argparse.Namespace) -> Mapping[str, Any]:
    if words.plots:
        check_plots(words.plots)
    bench = Bench(device_of(words), objective_of(words))
    plan, speed, policies = plan_of(words), 1.0, words.policy or list(POLICIES)
    if words.ideal:
        bench = replace(bench, device=equal_device(bench.device))
        plan, speed = equal_plan(plan), SPEED
        policies = words.policy or ["cost", "round-robin", "least-loaded", *PLAIN_POLICIES]
    requests = source_of(words).requests(words.speed or speed)
    runs = {}
    for policy in policies:
        runs[policy] = bench.run(plan, requests, policy)
        print(summary(policy, runs[policy][1]), flush=True)
    rows = {policy: figures for policy, (_, figures) in runs.items()}
    print(f"\n{plan.name}, {len(requests):,} requests\n\n{as_table(rows)}")
    print("\n".join(remarks(rows)))
    if words.plots:
        plot_runs({policy: one for policy, (one, _) in runs.items()}, words.plots)
    return {policy: figures.as_json() for policy, figures in rows.items()}
