"""When synthetic requests come: gamma intervals, and a day that rises and falls."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from cluster.bench.arrivals import OpenLoop


@dataclass(frozen=True, slots=True)
class Day:
    """The rate is the mean times 1 + depth * sin(2 pi t / period)."""

    depth: float = 0.0
    period_s: float = 86_400.0

    def expected(self, at_s: float) -> float:
        """Seconds of the mean rate that bring as many requests as come up to `at_s`."""
        wave = self.period_s / (2 * math.pi)
        return at_s + self.depth * wave * (1 - math.cos(at_s / wave))

    def when(self, expected_s: float) -> float:
        """The inverse, which exists as long as the depth is below 1."""
        swing = self.depth * self.period_s / math.pi
        low, high = expected_s - swing, expected_s
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if self.expected(middle) < expected_s else (low, middle)
        return high


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`burstiness` is the shape of the intervals' gamma distribution: 1 is Poisson's process,
    less comes in bursts."""

    rate: float
    seconds: float
    burstiness: float = 1.0
    day: Day = Day()

    def times(self, seed: int) -> Iterator[float]:
        steady = OpenLoop(self.rate, self.burstiness).times(seed)
        times = (self.day.when(at_s) for at_s in steady) if self.day.depth else steady
        return takewhile(lambda at_s: at_s < self.seconds, times)
