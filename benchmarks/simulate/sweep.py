"""The most load at which enough requests are good. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.simulate.figures import Figures

GROWTH = 1.3
PRECISION = 1.03  # between the last load that is fine and the first one that is not
MOST_TIMES = 100.0  # the start, up or down: a few requests are good however fast they come


@dataclass(frozen=True)
class Sweep:
    """What was measured, by load."""

    points: Sequence[tuple[float, Figures]]  # the least load first
    least_share: float

    @property
    def peak(self) -> tuple[float, Figures] | None:
        """The most good requests a second of those runs in which enough were good."""
        fine = [point for point in self.points if point[1].good_share >= self.least_share]
        return max(fine, key=lambda point: point[1].goodput, default=None)

    @property
    def is_open(self) -> bool:
        """Enough were good at the most that was tried."""
        return self.points[-1][1].good_share >= self.least_share


def sweep(measure: Callable[[float], Figures], start: float, least_share: float) -> Sweep:
    """Up or down in large steps until the share is crossed, then halving."""
    points: list[tuple[float, Figures]] = []

    def fine(load: float) -> bool:
        figures = measure(load)
        points.append((load, figures))
        return figures.good_share >= least_share

    low, high = (start, start * GROWTH) if fine(start) else (start / GROWTH, start)
    if low < start:
        while not fine(low) and low > start / MOST_TIMES:
            low, high = low / GROWTH, low
    else:
        while high < start * MOST_TIMES and fine(high):
            low, high = high, high * GROWTH
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fine(middle) else (low, middle)
    return Sweep(sorted(points, key=lambda point: point[0]), least_share)
