"""Peak goodput of prefill and decode workers, and of as many colocated ones by step budget."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.simulate.arguments import (
    device_of,
    objective_of,
    parse_numbers,
    plan_of,
    share,
    source_of,
)
from benchmarks.simulate.bench import Bench
from benchmarks.simulate.commands.peak import LEAST_SHARE, as_json, print_peaks, sweep_load
from benchmarks.simulate.plots import check_plots, plot_sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budgets", default="512,1024,2048,8192", help="tokens a step")
    parser.add_argument("--least-share", type=share, default=LEAST_SHARE)
    parser.add_argument("--only-colocated", action="store_true")


def run(words: argparse.Namespace) -> Mapping[str, Any]:
    if words.plots:
        check_plots(words.plots)
    bench = Bench(device_of(words), objective_of(words))
    source, plan = source_of(words), plan_of(words)
    plans = {} if words.only_colocated else {plan.name: plan}
    for budget in parse_numbers("budgets", words.budgets):
        alone = replace(plan, num_prefill=0, num_decode=plan.num_workers, decode_step_tokens=budget)
        plans[alone.name] = alone
    found = {
        name: sweep_load(bench, one, source, words.speed, words.least_share, "cost")
        for name, one in plans.items()
    }
    print_peaks(f"{plan.num_workers} workers", found)
    if words.plots:
        plot_sweep({name: one.points for name, one in found.items()}, words.plots)
    return as_json(found)
