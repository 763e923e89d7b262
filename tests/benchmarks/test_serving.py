import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import goals, parts
from benchmarks.serving.loads import Crowd
from benchmarks.serving.parts import PARTS, Figures, Turn
from benchmarks.serving.processes import Family
from benchmarks.serving.results import Measured, Results
from benchmarks.serving.systems import AUTO, RAY_LLM, SYSTEMS, Place, Running
from benchmarks.sides import SideSpec
from cluster.bench.measure import summarise
from tests.cluster.bench.records import answered

HELD: list[goals.Ratio | goals.Bound | goals.Whole] = [
    *goals.RATIOS,
    *goals.BOUNDS,
    *goals.WHOLES,
]

_BALLAST = 64 << 20
_SLEEPER = f"held = bytearray(b'x' * {_BALLAST}); print('up', flush=True); input()"
_PARENT = (
    "import subprocess, sys;"
    f"subprocess.run([sys.executable, '-c', {_SLEEPER!r}], start_new_session=True)"
)
_NAMELESS = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_SLEEPER!r}], env={{}})"
)


def results(*rates: tuple[int, str, float]) -> Results:
    made = Results()
    for turn, system, rate in rates:
        figures = Figures("8", {"tokens/s": rate})
        made.measured.append(Measured("load", system, turn, figures))
    return made


def test_figures_are_medians_over_the_turns() -> None:
    made = results((0, AUTO, 100.0), (1, AUTO, 300.0), (2, AUTO, 120.0), (0, RAY_LLM, 40.0))
    assert [row["tokens/s"] for row in made.rows("load")] == [120.0, 40.0]
    assert made.value("load", AUTO, "8", "tokens/s") == 120.0
    assert made.value("load", AUTO, "32", "tokens/s") is None


@pytest.mark.parametrize(("peer", "kept"), [(40.0, "yes"), (60.0, "no")])
def test_a_goal_is_held_against_the_ratio(peer: float, kept: str) -> None:
    (row,) = goals.rows(results((0, AUTO, 120.0), (0, RAY_LLM, peer)))
    assert (row["is"], row["kept"]) == (f"{120 / peer:.2f} x", kept)


@pytest.mark.parametrize(("complete", "kept"), [(1000.0, "yes"), (999.0, "no")])
def test_a_stream_that_breaks_keeps_no_goal(complete: float, kept: str) -> None:
    made = Results()
    figures = Figures("1,000", {"complete": complete, "of": 1000.0})
    made.measured.append(Measured("streams", AUTO, 0, figures))
    (row,) = goals.rows(made)
    assert (row["is"], row["kept"]) == (f"{complete:,.0f} of 1,000", kept)


def test_goals_are_about_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that no part gives would leave its goal out without a sign."""
    names = {(part, SYSTEMS[key].name) for part, what in PARTS.items() for key in what.systems}
    told = {part: told_by(part, monkeypatch) for part in {part for part, *_ in HELD}}
    for goal in HELD:
        assert (goal.part, goal.system) in names
        assert goal.figure in told[goal.part][goal.case]
    for ratio in goals.RATIOS:
        assert (ratio.part, ratio.against) in names
    for whole in goals.WHOLES:
        assert whole.of in told[whole.part][whole.case]


def told_by(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The figures of a part by its cases, as it gives them of a system that answers at once."""
    summary = summarise([answered(0.5, [0.25] * 9), answered(0.5, [0.25] * 9)])
    engine = SimpleNamespace(ask=lambda *_: {"first_token_s": [0.5]}, close=lambda: None)
    monkeypatch.setattr(parts, "measure", lambda *_: summary)
    monkeypatch.setattr(parts, "steadiness", lambda *_: (summary, summary))
    monkeypatch.setattr(parts, "crowd", lambda *_: Crowd(summary, 0))
    monkeypatch.setattr(SideSpec, "start", lambda *_, **__: engine)
    family: Any = SimpleNamespace(environment={}, pss_bytes=lambda: 0)
    part = PARTS[name]
    place = Place(part.shape, Path("models/model"), Path("logs"), None)
    running = Running("http://x", "model", 1000, family, 1.0)
    turn = Turn(SYSTEMS[part.systems[0]], place, running, count(), quick=False)
    return {one.case: {*one.values} for one in part.measure(turn)}


@pytest.fixture(params=[_PARENT, _NAMELESS], ids=["session", "environment"])
def grandchild(request: pytest.FixtureRequest) -> Iterator[tuple[Family, subprocess.Popen[str]]]:
    family = Family()
    child = subprocess.Popen(
        [sys.executable, "-c", request.param],
        env=family.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout
    assert child.stdout.readline() == "up\n"
    yield family, child
    family.end()
    child.communicate()


def test_a_family_is_found_outside_its_session_and_its_environment(
    grandchild: tuple[Family, subprocess.Popen[str]],
) -> None:
    family, child = grandchild
    assert family.pss_bytes() > _BALLAST
    assert family.cpu_s() > 0
    family.end()
    child.wait(10)
    assert family.pss_bytes() == 0
