"""How long prompts and answers are: distributions of whole numbers of at least 1."""

import math
from dataclasses import dataclass
from random import Random
from typing import Protocol

from engine.errors import ConfigError

FORMS = "N, uniform:LEAST:MOST or lognormal:MEDIAN:SIGMA[:MOST]"


class Lengths(Protocol):
    def draw(self, random: Random) -> int: ...


@dataclass(frozen=True)
class Fixed:
    length: int

    def draw(self, random: Random) -> int:
        return self.length


@dataclass(frozen=True)
class Uniform:
    least: int
    most: int  # this too

    def draw(self, random: Random) -> int:
        return random.randint(self.least, self.most)


@dataclass(frozen=True)
class LogNormal:
    """`sigma` is that of the logarithm. What exceeds `most` is `most`."""

    median: float
    sigma: float
    most: int | None = None

    def draw(self, random: Random) -> int:
        length = max(1, round(self.median * math.exp(random.gauss(0.0, self.sigma))))
        return length if self.most is None else min(length, self.most)


def parse_lengths(field: str, text: str) -> Lengths:
    kind, _, rest = text.partition(":")
    words = rest.split(":") if rest else []
    try:
        match kind, words:
            case number, []:
                return Fixed(_at_least_1(number))
            case "uniform", [least, most]:
                uniform = Uniform(_at_least_1(least), _at_least_1(most))
                if uniform.least <= uniform.most:
                    return uniform
            case "lognormal", [median, sigma, *most] if len(most) <= 1:
                limit = _at_least_1(most[0]) if most else None
                lognormal = LogNormal(float(median), float(sigma), limit)
                # e to the power of more is beyond every context
                if 1 <= lognormal.median < math.inf and 0 <= lognormal.sigma <= 10:
                    return lognormal
    except ValueError:
        pass
    raise ConfigError(field, f"{text!r}: must be {FORMS}, of at least 1")


def _at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
