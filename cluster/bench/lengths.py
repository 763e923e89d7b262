"""How long prompts and answers are: distributions of whole numbers of at least 1."""

import math
from dataclasses import dataclass
from random import Random
from typing import Protocol

from engine.errors import ConfigError

MOST_TOKENS = 10_000_000  # of a prompt or an answer: as long as the longest contexts
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
    most: int = MOST_TOKENS

    def draw(self, random: Random) -> int:
        length = max(1, round(self.median * math.exp(random.gauss(0.0, self.sigma))))
        return min(length, self.most)


def parse_lengths(field: str, text: str, most: int = MOST_TOKENS) -> Lengths:
    kind, _, rest = text.partition(":")
    words = rest.split(":") if rest else []
    try:
        match kind, words:
            case number, []:
                return Fixed(_within(number, most))
            case "uniform", [low, high]:
                uniform = Uniform(_within(low, most), _within(high, most))
                if uniform.least <= uniform.most:
                    return uniform
            case "lognormal", [median, sigma, *high] if len(high) <= 1:
                limit = _within(high[0], most) if high else most
                lognormal = LogNormal(float(median), float(sigma), limit)
                # e to the power of more is beyond every context
                if 1 <= lognormal.median <= most and 0 <= lognormal.sigma <= 10:
                    return lognormal
    except ValueError:
        pass
    raise ConfigError(field, f"{text!r}: must be {FORMS}, from 1 to {most}")


def _within(text: str, most: int) -> int:
    number = int(text)
    if not 1 <= number <= most:
        raise ValueError(text)
    return number
