"""Figures of all turns: medians for people, everything for programs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.serving.parts import Figures


@dataclass(frozen=True)
class Measured:
    part: str
    system: str
    turn: int
    figures: Figures


class Results:
    """Filled turn by turn."""

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.foreign: list[float] = []  # shares of the CPU, one for each stay of a system
        self.failures: list[str] = []

    def value(self, part: str, system: str, case: str, figure: str) -> float | None:
        """The median over the turns; None if there is none."""
        values = [
            one.figures.values[figure]
            for one in self.measured
            if (one.part, one.system, one.figures.case) == (part, system, case)
        ]
        return median(values) if values else None

    def parts(self) -> list[str]:
        return list(dict.fromkeys(one.part for one in self.measured))

    def rows(self, part: str) -> Iterator[dict[str, object]]:
        """In the order in which they were measured first."""
        of_part = [one for one in self.measured if one.part == part]
        for system, case in dict.fromkeys((one.system, one.figures.case) for one in of_part):
            figures = next(
                one.figures.values
                for one in of_part
                if (one.system, one.figures.case) == (system, case)
            )
            medians = {name: self.value(part, system, case, name) for name in figures}
            yield {"system": system, "at a time": case, **medians}

    def as_json(self, **about: Any) -> dict[str, Any]:
        return {
            **about,
            "foreign_cpu_shares": self.foreign,
            "failures": self.failures,
            "medians": {part: list(self.rows(part)) for part in self.parts()},
            "turns": [asdict(one) for one in self.measured],
        }
