"""Pictures of a run: how its times are distributed, and how it went. Needs matplotlib."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from cluster.bench.load import Outcome
from cluster.bench.record import Record
from engine.errors import ConfigError

_SIZE_IN = (8.0, 4.5)


def check_plots(folder: Path) -> None:
    """Before a run, rather than after it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("plots", "needs matplotlib: pip install 'kvrelay[bench]'") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError("plots", f"{folder}: {error}") from error


def write_plots(outcome: Outcome, folder: Path) -> list[Path]:
    complete = [record for record in outcome.records if record.failure is None]
    first = [record.ttft_s * 1e3 for record in complete if record.ttft_s is not None]
    gaps = [gap * 1e3 for record in complete for gap in record.gaps_s]
    return [
        _cdf(folder / "ttft.png", first, "time to first token, ms"),
        _cdf(folder / "itl.png", gaps, "inter-token latency, ms"),
        _timeline(folder / "timeline.png", outcome.records, outcome.start_s),
    ]


def tokens_by_second(records: Iterable[Record], start_s: float) -> dict[int, float]:
    """Output tokens; an answer's tokens are spread evenly over its pieces."""
    counts: defaultdict[int, float] = defaultdict(float)
    for record in records:
        if record.first_s is None or not record.num_output:
            continue
        times = list(accumulate(record.gaps_s, initial=record.first_s))
        for at_s in times:
            counts[int(at_s - start_s)] += record.num_output / len(times)
    return dict(counts)


def under_way_by_second(records: Iterable[Record], start_s: float) -> Counter[int]:
    """Requests that were under way at some time of the second."""
    counts: Counter[int] = Counter()
    for record in records:
        counts.update(range(int(record.sent_s - start_s), int(record.end_s - start_s) + 1))
    return counts


def _cdf(path: Path, values: Sequence[float], label: str) -> Path:
    figure, axes = new_figure()
    ordered = sorted(values)
    shares = [(number + 1) / len(ordered) for number in range(len(ordered))]
    axes.step(ordered, shares, where="post")
    axes.set(xlabel=label, ylabel="share of values", ylim=(0, 1))
    return saved(figure, path)


def _timeline(path: Path, records: Sequence[Record], start_s: float) -> Path:
    figure, axes = new_figure()
    tokens = tokens_by_second(records, start_s)
    under_way = under_way_by_second(records, start_s)
    seconds = range(max([*tokens, *under_way], default=0) + 1)
    axes.plot(seconds, [tokens.get(second, 0) for second in seconds], label="output tokens/s")
    axes.set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))
    beside = axes.twinx()
    beside.plot(seconds, [under_way[s] for s in seconds], color="grey", label="requests under way")
    beside.set(ylabel="requests under way", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=2)
    return saved(figure, path)


def new_figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
