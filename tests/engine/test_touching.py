"""The cache's memory is touched in the background, and never at the end's expense."""

import subprocess
import sys
from pathlib import Path

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
