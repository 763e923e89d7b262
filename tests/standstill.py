"""What a test says that failed while its machine stood still: nothing, so it is asked again.

A shared machine may stand still for a second or two, or leave all that a test runs in without a
core. That is as long as silence that our workers take for a peer's death, and within a test such a
death has consequences that it did not ask for. A process of its own tells of it, which does nothing
but sleep: one that tests might itself be what holds them up.
"""

import contextlib
import os
import subprocess
import sys
import time
import warnings

import pytest
from _pytest.runner import runtestprotocol

PERIOD_S = 0.05
LATE_S = 0.3  # less than any time for which a worker waits for another's answer
MOST_TURNS = 3
MOST_S = 120.0  # of a turn: the next one has what is left of the test's time

_WATCH = """
import os, sys, time
period_s, late_s, parent = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
while os.getppid() == parent:
    began = time.monotonic()
    time.sleep(period_s)
    ended = time.monotonic()
    if ended - began - period_s >= late_s:
        print(ended, ended - began, flush=True)
"""


class Watch:
    """Of a process that does nothing but sleep, and should wake in time."""

    def __init__(self) -> None:
        arguments = (str(PERIOD_S), str(LATE_S), str(os.getpid()))
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCH, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self._told = self.process.stdout.fileno()
        os.set_blocking(self._told, False)

    def longest_since(self, began: float) -> float:
        """Of the times for which the machine stood still, in seconds, since `time.monotonic()`
        was that; 0 if it did not."""
        time.sleep(2 * PERIOD_S)  # both of us may have woken just now
        longest = 0.0
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._told, 1 << 16).splitlines():
                ended, lasted = map(float, line.split())
                if ended >= began:
                    longest = max(longest, lasted)
        return longest

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class AskAgain:
    """A plugin. Whatever fixtures a test had before, it has none of them when it is asked again."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._ask(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _ask(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        for turn in range(1, MOST_TURNS + 1):
            began = time.monotonic()
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            failed = [report for report in reports if report.failed]
            if not failed or turn == MOST_TURNS or time.monotonic() - began > MOST_S:
                break
            lasted = self._watch.longest_since(began)
            if not lasted:
                break
            warnings.warn(
                f"{item.nodeid} is asked again: it failed while the machine stood still for "
                f"{lasted:.1f} s ({failed[0].longreprtext.splitlines()[-1]})",
                stacklevel=2,
            )
            with contextlib.suppress(Exception, pytest.fail.Exception, pytest.skip.Exception):
                item.session._setupstate.teardown_exact(None)
        return reports

    def pytest_unconfigure(self) -> None:
        self._watch.end()
