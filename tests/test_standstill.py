import signal
import time
from collections.abc import Iterator

import pytest

from tests import standstill
from tests.standstill import LATE_S, MOST_TURNS, AskAgain, Watch

pytest_plugins = "pytester"

FAILS_AT_FIRST = """
import pytest

turns = []

@pytest.fixture(scope="module")
def fresh():
    return []

def test_this(fresh):
    turns.append(None)
    assert not fresh, "not what an earlier turn had"
    fresh.append(None)
    assert len(turns) > {num_failures}, f"turn {{len(turns)}}"

def test_next():
    pass
"""


class Told(Watch):
    def __init__(self, lasted: float) -> None:
        self._lasted = lasted

    def longest_since(self, began: float) -> float:
        return self._lasted

    def end(self) -> None:
        pass


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.end()


def test_a_machine_that_stands_still_is_seen(watch: Watch) -> None:
    began = time.monotonic()
    while not watch.longest_since(began):  # as it may have before it began to watch
        watch.process.send_signal(signal.SIGSTOP)
        time.sleep(2 * LATE_S)
        watch.process.send_signal(signal.SIGCONT)
    assert watch.longest_since(began) == 0, "told once"


def test_one_that_ended_before_is_none(watch: Watch) -> None:
    watch.process.send_signal(signal.SIGSTOP)
    time.sleep(2 * LATE_S)
    watch.process.send_signal(signal.SIGCONT)
    time.sleep(LATE_S)
    assert watch.longest_since(time.monotonic()) == 0


@pytest.mark.parametrize(
    ("lasted", "num_failures", "outcomes", "num_warnings"),
    [
        (1.5, 0, {"passed": 2}, 0),
        (1.5, 1, {"passed": 2}, 1),
        (1.5, MOST_TURNS, {"passed": 1, "failed": 1}, MOST_TURNS - 1),
        (0.0, 1, {"passed": 1, "failed": 1}, 0),
    ],
)
def test_what_failed_meanwhile_is_asked_again(
    pytester: pytest.Pytester,
    lasted: float,
    num_failures: int,
    outcomes: dict[str, int],
    num_warnings: int,
) -> None:
    pytester.makepyfile(FAILS_AT_FIRST.format(num_failures=num_failures))
    result = pytester.runpytest_inprocess("-p", "no:asyncio", plugins=[AskAgain(Told(lasted))])
    result.assert_outcomes(**outcomes, warnings=num_warnings)
    if num_warnings:
        result.stdout.fnmatch_lines(["*test_this is asked again: * stood still for 1.5 s*"])


def test_what_took_most_of_its_time_is_not(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that hangs ends by its time limit, which holds once."""
    monkeypatch.setattr(standstill, "MOST_S", 0.0)
    pytester.makepyfile(FAILS_AT_FIRST.format(num_failures=1))
    result = pytester.runpytest_inprocess("-p", "no:asyncio", plugins=[AskAgain(Told(1.5))])
    result.assert_outcomes(passed=1, failed=1)
