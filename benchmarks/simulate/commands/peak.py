"""Peak goodput: the most load at which 90 % of the requests are good, by policy."""

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.simulate.arguments import (
    ALL_POLICIES,
    Source,
    device_of,
    objective_of,
    plan_of,
    share,
    source_of,
)
from benchmarks.simulate.bench import Bench
from benchmarks.simulate.cluster import ClusterPlan
from benchmarks.simulate.figures import Figures
from benchmarks.simulate.plots import check_plots, plot_sweep
from benchmarks.simulate.report import as_table
from benchmarks.simulate.sweep import Sweep, sweep

LEAST_SHARE = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", action="append", choices=ALL_POLICIES, help="may be repeated; default: ours"
    )
    parser.add_argument("--least-share", type=share, default=LEAST_SHARE)


def run(words: argparse.Namespace) -> Mapping[str, Any]:
    if words.plots:
        check_plots(words.plots)
    bench = Bench(device_of(words), objective_of(words))
    source, plan = source_of(words), plan_of(words)
    found = {
        policy: sweep_load(bench, plan, source, words.speed, words.least_share, policy)
        for policy in words.policy or ["cost"]
    }
    print_peaks(plan.name, found)
    if words.plots:
        plot_sweep({name: one.points for name, one in found.items()}, words.plots)
    return as_json(found)


def sweep_load(
    bench: Bench, plan: ClusterPlan, source: Source, start: float, least_share: float, policy: str
) -> Sweep:
    def measure(speed: float) -> Figures:
        _, figures = bench.run(plan, source.requests(speed), policy)
        print(
            f"{plan.name}, {policy}, x{speed:.2f}: {figures.good_share:.1%} good, "
            f"goodput {figures.goodput:.2f}/s",
            flush=True,
        )
        return figures

    return sweep(measure, start, least_share)


def print_peaks(title: str, found: Mapping[str, Sweep]) -> None:
    peaks = {f"{name}, x{one.peak[0]:.2f}": one.peak[1] for name, one in found.items() if one.peak}
    print(f"\n{title}: the most goodput\n")
    if peaks:
        print(as_table(peaks))
    for name, one in found.items():
        if one.peak is None:
            print(f"{name}: at no load that was tried were {one.least_share:.0%} good")
        elif one.is_open:
            print(f"{name}: more than was tried may be {one.least_share:.0%} good")


def as_json(found: Mapping[str, Sweep]) -> Mapping[str, Any]:
    return {
        name: [{"speed": load, **figures.as_json()} for load, figures in one.points]
        for name, one in found.items()
    }
