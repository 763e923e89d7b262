"""The repository's own tests that run on a GPU, several processes side by side."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.running import ROOT

ATTENTION = "tests/engine/kernels/triton/test_attention.py"
SHAPES = "head_shapes or half_precision or block_sizes"
# They take the GPU where there is one: kernels compiled, `device: auto` is cuda.
SUITES = {
    "attention, shapes": (ATTENTION, "-k", SHAPES),
    "attention, the rest": (ATTENTION, "-k", f"not ({SHAPES})"),
    "rows and writes": (
        "tests/engine/kernels/triton/test_rows.py",
        "tests/engine/kernels/triton/test_writes.py",
    ),
    "sampler": ("tests/engine/sampler/test_triton.py",),
    "token-exact": ("tests/engine/test_exact.py",),
    "random weights": ("tests/engine/test_random_tensors.py",),
    "hand-over": ("tests/engine/test_hand_over.py",),
    "collective": ("tests/kv_transfer/test_collective_gpu.py",),
    "sockets": ("tests/kv_transfer/test_socket_device.py", "-k", "gpu or broken"),
}
SMOKE_SUITES = {"tiles": ("tests/engine/kernels/triton/test_tiles.py",)}


def run(bench: Bench) -> None:
    started = [
        (name, _start(bench.folder / f"pytest {name}.xml", paths))
        for name, paths in (SMOKE_SUITES if bench.smoke else SUITES).items()
    ]
    for name, process in started:
        try:
            output, _ = process.communicate(timeout=max(bench.seconds_left, 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            bench.say(f"{name}: ended, its time was over")
        bench.say(f"{name}: {output[-3000:]}")
        passed, bad = _counts(bench.folder / f"pytest {name}.xml")
        bench.check(f"{name}: of {passed + bad} tests failed", bad if passed else 1, 0.0)


def _start(report: Path, paths: tuple[str, ...]) -> "subprocess.Popen[str]":
    ini = Path(__file__).with_name("pytest.ini")
    command = [sys.executable, "-m", "pytest", "-c", str(ini), "--rootdir", str(ROOT), *paths]
    return subprocess.Popen(
        [*command, f"--junitxml={report}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _counts(report: Path) -> tuple[int, int]:
    """(passed, failed or in error); none of either where pytest did not come to its end."""
    if not report.exists():
        return 0, 0
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return int(suite.get("tests", 0)) - bad - int(suite.get("skipped", 0)), bad
