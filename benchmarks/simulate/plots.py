"""Pictures of runs. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulate.figures import Figures, tpot_s, ttft_s
from benchmarks.simulate.simulation import Run
from cluster.bench.plots import check_plots, new_figure, saved

__all__ = ["check_plots", "plot_runs", "plot_sweep"]


def plot_runs(runs: Mapping[str, Run], folder: Path) -> list[Path]:
    """How the times of each run are distributed."""
    first = {name: [ttft_s(flight) for flight in run.flights] for name, run in runs.items()}
    token = {
        name: [None if (value := tpot_s(flight)) is None else value * 1e3 for flight in run.flights]
        for name, run in runs.items()
    }
    return [
        _distributions(folder / "ttft.png", first, "time to first token, s"),
        _distributions(folder / "tpot.png", token, "time per output token, ms"),
    ]


def plot_sweep(sweeps: Mapping[str, Sequence[tuple[float, Figures]]], folder: Path) -> list[Path]:
    """The share of good requests over the load, and their rate."""
    return [
        _curves(
            folder / "good_share.png", sweeps, "share of good requests", lambda f: f.good_share
        ),
        _curves(folder / "goodput.png", sweeps, "good requests/s", lambda f: f.goodput),
    ]


def _distributions(path: Path, values: Mapping[str, Sequence[float | None]], label: str) -> Path:
    figure, axes = new_figure()
    for name, found in values.items():
        ordered = sorted(value for value in found if value is not None)
        shares = [(number + 1) / len(ordered) for number in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=name)
    axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1))
    axes.set_xscale("symlog", linthresh=max(1e-3, _median(values) / 10))
    axes.set_xlim(left=0)
    axes.legend()
    return saved(figure, path)


def _median(values: Mapping[str, Sequence[float | None]]) -> float:
    every = sorted(value for found in values.values() for value in found if value is not None)
    return every[len(every) // 2] if every else 1.0


def _curves(
    path: Path, sweeps: Mapping[str, Sequence[tuple[float, Figures]]], label: str, value: Any
) -> Path:
    figure, axes = new_figure()
    for name, points in sweeps.items():
        ordered = sorted(points, key=lambda point: point[0])
        rates = [figures.rate for _, figures in ordered]
        axes.plot(rates, [value(figures) for _, figures in ordered], marker="o", label=name)
    axes.set(xlabel="requests/s", ylabel=label, ylim=(0, None))
    axes.legend()
    return saved(figure, path)
