"""When requests are sent: as answers come, at a rate of their own, or as a trace recorded it."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class ClosedLoop:
    """So many conversations at a time; the next one begins when one ends."""

    concurrency: int


@dataclass(frozen=True)
class OpenLoop:
    """So many conversations a second, whether or not earlier ones have ended.

    Intervals follow a gamma distribution of the shape `burstiness`: 1 is a Poisson process, less
    is burstier. None: all intervals are equal.
    """

    rate: float
    burstiness: float | None = 1.0

    def times(self, seed: int) -> Iterator[float]:
        """Seconds since the beginning, without end."""
        random = Random(f"arrivals {seed}")
        number, at_s = 0, 0.0
        while True:
            yield at_s
            number += 1
            if self.burstiness is None:
                at_s = number / self.rate
            else:
                at_s += random.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))


@dataclass(frozen=True)
class Recorded:
    """At the times of the trace, so many times as fast."""

    speed: float = 1.0


Arrivals = ClosedLoop | OpenLoop | Recorded
