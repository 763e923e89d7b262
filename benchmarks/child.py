"""The process of an engine under measure: workloads by name come in, runs go out, as JSON lines.

Runs in the peer's own environment, so it imports the standard library alone.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.run import Side, run
from benchmarks.workloads import FIRST_TOKEN, WORKLOADS


@dataclass(frozen=True)
class SideInfo:
    """What the other end is told before the first run."""

    version: str
    weights_bytes: int
    kv_bytes: int


def arguments() -> argparse.Namespace:
    """What `sides.SideSpec.start` gives to every engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--num-parameters", type=int, required=True)
    parser.add_argument("--settled", action="store_true")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args()


def serve(start: Callable[[], tuple[Side, SideInfo]]) -> None:
    """Answers until its standard input ends; whatever the engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    side, info = start()
    answers.write(json.dumps(asdict(info)) + "\n")
    workloads = {**WORKLOADS, FIRST_TOKEN.name: FIRST_TOKEN}
    for line in sys.stdin:
        order = json.loads(line)
        measured = asdict(run(side, workloads[order["workload"]], order["seed"]))
        answers.write(json.dumps(measured | {"peak_resident_bytes": _peak_resident()}) + "\n")


def _peak_resident() -> int:
    """Of the largest process of this session: an engine may run its model in a child."""
    session = os.getsid(0)
    peaks = [0]
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.getsid(int(status.parent.name)) == session:
                peaks += _peaks(status.read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return max(peaks)


def _peaks(status: str) -> list[int]:
    lines = status.splitlines()
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
