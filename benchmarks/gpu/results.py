"""What a part found: figures beside their limits, and checks beside their bounds."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import table

FIGURE_HEADINGS = ("part", "figure", "unit", "value", "limit", "share", "goal", "met")
CHECK_HEADINGS = ("part", "check", "error", "bound", "passed")


@dataclass(frozen=True)
class Figure:
    """`share` is what the goal speaks of: of the limit, or of what stands in `share_of`."""

    part: str
    name: str
    unit: str
    value: float
    limit: float | None = None
    share: float | None = None
    share_of: str = "limit"
    goal: float | None = None
    goal_is_most: bool = False  # a share that should stay below

    @property
    def met(self) -> bool | None:
        if self.share is None or self.goal is None:
            return None
        return self.share <= self.goal if self.goal_is_most else self.share >= self.goal


@dataclass(frozen=True)
class Check:
    part: str
    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """NaN never does."""
        return self.error <= self.bound


Result = Figure | Check


def append(path: Path, result: Result) -> None:
    """A line of its own at once: a part that is ended leaves what it had found."""
    with path.open("a") as file:
        file.write(json.dumps({"kind": type(result).__name__, **asdict(result)}) + "\n")


def read(path: Path) -> list[Result]:
    """A last line that was cut short with its part counts for nothing."""
    if not path.exists():
        return []
    results: list[Result] = []
    for line in path.read_text().split("\n")[:-1]:
        values: dict[str, Any] = json.loads(line)
        kind = values.pop("kind")
        results.append(Figure(**values) if kind == "Figure" else Check(**values))
    return results


def as_json(results: Iterable[Result]) -> list[dict[str, Any]]:
    """NaN and infinities, which JSON has not, as None."""
    rows = []
    for result in results:
        verdict = {"met": result.met} if isinstance(result, Figure) else {"passed": result.passed}
        values = asdict(result) | verdict
        rows.append({k: _finite(v) for k, v in values.items()})
    return rows


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(results: Sequence[Result], passed_checks: bool = True) -> str:
    """Without `passed_checks` those that passed are only counted."""
    figures = [r for r in results if isinstance(r, Figure)]
    checks = [r for r in results if isinstance(r, Check)]
    count = f"{sum(c.passed for c in checks)} of {len(checks)} checks passed"
    if not passed_checks:
        checks = [c for c in checks if not c.passed]
    tables = [
        table.lines([headings, *rows])
        for headings, rows in (
            (CHECK_HEADINGS, [_check_cells(c) for c in checks]),
            (FIGURE_HEADINGS, [_figure_cells(f) for f in figures]),
        )
        if rows
    ]
    return "\n\n".join([count, *tables])


def _check_cells(check: Check) -> tuple[str, ...]:
    passed = "yes" if check.passed else "NO"
    return (check.part, check.name, f"{check.error:.2g}", f"{check.bound:.2g}", passed)


def _figure_cells(figure: Figure) -> tuple[str, ...]:
    share, goal, met = "-", "-", "-"
    if figure.share is not None:
        ratio = f"{figure.share:.2f} x" if figure.share >= 2 else f"{figure.share:.1%}"
        share = ratio if figure.share_of == "limit" else f"{ratio} of {figure.share_of}"
    if figure.goal is not None:
        number = f"{figure.goal:g} x" if figure.goal >= 1.5 else f"{figure.goal:.0%}"
        goal = ("<= " if figure.goal_is_most else ">= ") + number
        met = {True: "yes", False: "NO", None: "-"}[figure.met]
    limit = "-" if figure.limit is None else f"{figure.limit:.4g}"
    return (
        figure.part,
        figure.name,
        figure.unit,
        f"{figure.value:.4g}",
        limit,
        share,
        goal,
        met,
    )
