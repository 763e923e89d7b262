"""Runs the parts, each in a process of its own and with its own time limit, and writes results.

python -m benchmarks.gpu [--part NAME]... [--out FOLDER] [--total-s SECONDS] [--smoke]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import results
from benchmarks.gpu.machine import describe
from benchmarks.gpu.parts import CHOICES, Part, chosen
from benchmarks.gpu.running import Running

TOTAL_S = 540.0
LEAST_S = 15.0  # below which a part is not begun


class Session:
    """A run of some parts: checks side by side, then each measure alone."""

    def __init__(self, folder: Path, smoke: bool, total_s: float) -> None:
        self._folder = folder
        self._smoke = smoke
        self._ends_s = time.monotonic() + total_s
        self.ends: dict[str, str] = {}  # of each part: how it ended
        self.log = ""

    def run(self, parts: Sequence[Part]) -> None:
        checks = [part for part in parts if not part.measures]
        self._together(checks)
        for part in parts:
            if part.measures:
                self._together([part])

    def _together(self, parts: Sequence[Part]) -> None:
        left_s = self._ends_s - time.monotonic()
        if left_s < LEAST_S:
            self.ends |= {part.name: "not begun, no time was left" for part in parts}
            return
        started = [
            Running(part.name, self._folder, min(part.limit_s, left_s), self._smoke)
            for part in parts
        ]
        for running in started:
            self.ends[running.name] = running.wait()
            self.log += running.log()
            _say(f"{running.name}: {self.ends[running.name]}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", action="append", default=[], choices=CHOICES, help="or a group; default: all"
    )
    parser.add_argument("--out", type=Path, help="default: $OUT, or benchmarks/results/gpu")
    parser.add_argument("--total-s", type=float, default=TOTAL_S)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU too")
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    out = args.out or Path(os.environ.get("OUT", "benchmarks/results/gpu"))
    out.mkdir(parents=True, exist_ok=True)
    parts = chosen(args.part)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder), args.smoke, args.total_s)
        session.run(parts)
        found = [r for part in parts for r in results.read(Path(folder) / f"{part.name}.jsonl")]
    command = "benchmarks/gpu/run.sh " + " ".join(sys.argv[1:])
    machine = describe()
    summary = {
        "command": command,
        "smoke": args.smoke,
        "machine": machine,
        "took_s": round(time.monotonic() - started, 1),
        "parts": session.ends,
        "results": results.as_json(found),
    }
    head = "\n".join(
        [
            command,
            ", ".join(f"{k} {v}" for k, v in machine.items()),
            *([] if not args.smoke else ["SMOKE: tiny shapes, the figures mean nothing"]),
            *(f"{name}: {end}" for name, end in session.ends.items()),
            "",
        ]
    )
    (out / "results.json").write_text(json.dumps(summary, indent=2) + "\n")
    (out / "table.txt").write_text(f"{head}\n{results.as_text(found)}\n")
    (out / "log.txt").write_text(session.log)
    print(f"{head}\n{results.as_text(found, passed_checks=False)}")
    sound = all(end.startswith("done") for end in session.ends.values())
    right = all(r.passed for r in found if isinstance(r, results.Check))
    return 0 if sound and right else 1


if __name__ == "__main__":
    sys.exit(main())
