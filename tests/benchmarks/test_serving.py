import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.serving import goals
from benchmarks.serving.parts import PARTS, Figures
from benchmarks.serving.processes import Family
from benchmarks.serving.results import Measured, Results
from benchmarks.serving.systems import AUTO, RAY_LLM, SYSTEMS

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


def test_goals_are_about_what_is_measured() -> None:
    """A name that no part gives would leave its goal out without a sign."""
    names = {(part, SYSTEMS[key].name) for part, what in PARTS.items() for key in what.systems}
    held: list[goals.Ratio | goals.Bound] = [*goals.RATIOS, *goals.BOUNDS]
    for goal in held:
        assert (goal.part, goal.system) in names
    for ratio in goals.RATIOS:
        assert (ratio.part, ratio.against) in names


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
