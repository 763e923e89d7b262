"""Figures as tables to read."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.simulate.figures import Figures
from benchmarks.table import lines

_HEADINGS = (
    "", "req/s", "TTFT mean", "p50", "p90", "p99", "TPOT p50", "p90", "p99", "E2E p50", "p90",
    "good", "goodput", "hit", "fetched", "local", "imbalance", "busy", "GPU-s",
)  # fmt: skip


def as_table(rows: Mapping[str, Figures]) -> str:
    """Times to first tokens and whole answers in seconds, those of tokens in milliseconds."""
    return lines([_HEADINGS, *(_row(name, figures) for name, figures in rows.items())])


def _row(name: str, one: Figures) -> Sequence[str]:
    return (
        name,
        f"{one.rate:.2f}",
        f"{one.ttft.mean:.2f}",
        *(f"{one.ttft.percentiles[share]:.2f}" for share in (50, 90, 99)),
        *(f"{one.tpot.percentiles[share] * 1e3:.1f}" for share in (50, 90, 99)),
        *(f"{one.total.percentiles[share]:.1f}" for share in (50, 90)),
        f"{one.good_share:.1%}",
        f"{one.goodput:.2f}",
        f"{one.hit_share:.1%}",
        f"{one.fetch_share:.1%}",
        f"{one.local_share:.1%}",
        _by_leg(one.imbalance, "{:.2f}"),
        _by_leg(one.busy_share, "{:.0%}"),
        f"{one.gpu_s:,.0f}",
    )


def summary(name: str, one: Figures) -> str:
    """For whoever waits for the table."""
    return (
        f"{name}: TTFT mean {one.ttft.mean:.2f} s, p90 {one.ttft.percentiles[90]:.2f} s, "
        f"{one.good_share:.1%} good, goodput {one.goodput:.2f}/s, hit {one.hit_share:.1%}"
    )


def remarks(rows: Mapping[str, Figures]) -> list[str]:
    """What does not happen in every run."""
    counted: Mapping[str, Callable[[Figures], int]] = {
        "refused": lambda one: one.num_refused,
        "moved to another worker": lambda one: one.num_moved,
        "preempted": lambda one: one.num_preemptions,
        "spilled to another cell": lambda one: one.num_spilled,
    }
    return [
        f"{name}: {count(figures):,} {what}"
        for name, figures in rows.items()
        for what, count in counted.items()
        if count(figures)
    ]


def likeness_table(found: Mapping[str, float], imitated: Mapping[str, float]) -> str:
    """Beside what the traffic imitates, where that is known."""
    cells = [("", "here", "imitates", "off by")]
    for name, value in found.items():
        other = imitated.get(name)
        off = "" if not other else f"{value / other - 1:+.1%}"
        cells.append((name, _number(value), "" if other is None else _number(other), off))
    return lines(cells)


def _by_leg(values: Mapping[str, float], form: str) -> str:
    return " / ".join(form.format(value) for value in values.values())


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
