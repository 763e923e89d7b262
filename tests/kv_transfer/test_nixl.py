"""What loading NIXL does to its process."""

import subprocess
import sys

LOADED = """
import logging, logging.handlers, sys
kept = logging.handlers.MemoryHandler(10, target=logging.StreamHandler(sys.stdout))
logging.getLogger("of somebody else's").addHandler(kept)
from kv_transfer import nixl
nixl.prepare_environment()
nixl.load()
logging.getLogger("of somebody else's").error("is heard")
logging.getLogger("nixl").error("is heard, too")
kept.flush()
assert logging.raiseExceptions
"""


def test_the_log_handlers_of_others_are_kept() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "is heard\n"
    assert "is heard, too" in done.stderr
