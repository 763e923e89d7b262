"""What must be decided before a library is loaded, and what holds for every test."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.crossed import MARKER, leave_out_crossed
from tests.standstill import AskAgain, Watch

# Triton chooses when it is imported whether its kernels are interpreted or compiled.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Several test processes share the cores: OpenMP threads that spin while they wait make the suite
# three times as slow.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Nor does one that is woken for a tiny model's sums do anything but cost. Engines choose their own
# number, and so do the tests of kernels.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Time that passes is no fault of an example's: it counts what else the machine does.
hypothesis.settings.register_profile(
    "shared cores", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared cores")

# Modules and tests stay until the end: to look through them for garbage, again and again, took a
# twentieth of all.
gc.disable()

# What a shell runs in the background ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_handler_stays() -> Iterator[None]:
    """A command's log goes to the stream that a test captures, and must end with it."""
    root = logging.getLogger()
    before = set(root.handlers)
    yield
    for handler in set(root.handlers) - before:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    if not hasattr(config.option, "numprocesses") or config.option.numprocesses is None:
        config.pluginmanager.register(AskAgain(Watch()))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, and one process has it: there is one Ray at a time."""
    first = ("tests/engine/kernels/triton/test_aot.py", "tests/e2e/")
    leave_out_crossed(items)
    items.sort(key=lambda item: not item.nodeid.startswith(first))
