"""Lengths that a table of percentiles describes."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Quantiles:
    """(share below, length), from share 0 to share 1; geometric in between."""

    points: tuple[tuple[float, float], ...]

    def draw(self, random: Random) -> int:
        share = random.random()
        above = bisect_right(self.points, share, key=lambda point: point[0])
        (low, less), (high, more) = self.points[above - 1], self.points[above]
        part = (share - low) / (high - low)
        return max(1, round(less * math.exp(part * math.log(more / less))))
