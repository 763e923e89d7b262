"""The cache's memory is touched in the background, and never at the end's expense."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from engine.touching import touch_in_background

# A slab that would be touched for ever; it tells when it was allowed to stop.
ENDLESS = """
import threading
from engine.touching import touch_in_background

class Slab:
    def touch(self, stop):
        begun.set()
        while not stop():
            pass
        print("stopped in time", flush=True)
        return True

begun = threading.Event()
touch_in_background([Slab(), Slab()], threading.Event())
begun.wait()
"""


def test_an_exit_ends_the_touching_first() -> None:
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", ENDLESS]
    result = subprocess.run(words, capture_output=True, text=True, cwd=root, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "stopped in time\n" * 2


@pytest.mark.skipif(sys.platform != "linux", reason="a niceness is a whole process's elsewhere")
def test_what_an_engine_does_goes_before_touching() -> None:
    touched = threading.Event()
    nicenesses = []

    class Slab:
        data = memoryview(b"")

        def touch(self, stop: Callable[[], bool]) -> bool:
            nicenesses.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            touched.set()
            return True

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    touch_in_background([cast(Any, Slab())], threading.Event())
    assert touched.wait(30)
    assert nicenesses == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
