"""Observations by size, as plain numbers."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """One thread observes, any may read. `counts` has one more entry than `bounds`: of what is
    above the last. A value that equals a bound is below it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds ascend"
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
