"""Runs the parts, each in a process of its own and with its own time limit, and writes results.

python -m benchmarks.gpu [--part NAME]... [--out FOLDER] [--total-s SECONDS] [--smoke]
"""

import argparse
import json
import os
import signal
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
    """A run of some parts: checks side by side, then each measure alone. What is known is written
    after each of them, and when the run is ended: who kills it loses what is under way."""

    def __init__(self, folder: Path, args: argparse.Namespace, out: Path) -> None:
        self._folder = folder
        self._smoke: bool = args.smoke
        self._out = out
        self._command = "benchmarks/gpu/run.sh " + " ".join(sys.argv[1:])
        self._machine = describe()
        self._started = time.monotonic()
        self._ends_s = self._started + args.total_s
        self._log = ""
        self.ends: dict[str, str] = {}  # of each part: how it ended
        self.found: list[results.Result] = []

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
            self._write()
            return
        started = [
            Running(part.name, self._folder, min(part.limit_s, left_s), self._smoke)
            for part in parts
        ]
        try:
            for running in started:
                self._note(running, running.wait())
        except BaseException:
            self._end(started)
            raise

    def _end(self, started: Sequence[Running]) -> None:
        """Each has a session of its own, and would outlive this one."""
        for running in started:
            if running.name not in self.ends:
                running.end()
                self._note(running, "ended with the run")

    def _note(self, running: Running, end: str) -> None:
        self.ends[running.name] = end
        self.found += results.read(self._folder / f"{running.name}.jsonl")
        self._log += running.log()
        _say(f"{running.name}: {end}")
        self._write()

    @property
    def head(self) -> str:
        return "\n".join(
            [
                self._command,
                ", ".join(f"{k} {v}" for k, v in self._machine.items()),
                *([] if not self._smoke else ["SMOKE: tiny shapes, the figures mean nothing"]),
                *(f"{name}: {end}" for name, end in self.ends.items()),
                "",
            ]
        )

    def _write(self) -> None:
        summary = {
            "command": self._command,
            "smoke": self._smoke,
            "machine": self._machine,
            "took_s": round(time.monotonic() - self._started, 1),
            "parts": self.ends,
            "results": results.as_json(self.found),
        }
        (self._out / "results.json").write_text(json.dumps(summary, indent=2) + "\n")
        (self._out / "table.txt").write_text(f"{self.head}\n{results.as_text(self.found)}\n")
        (self._out / "log.txt").write_text(self._log)


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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    out = args.out or Path(os.environ.get("OUT", "benchmarks/results/gpu"))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder), args, out)
        session.run(chosen(args.part))
    print(f"{session.head}\n{results.as_text(session.found, passed_checks=False)}")
    sound = all(end.startswith("done") for end in session.ends.values())
    right = all(r.passed for r in session.found if isinstance(r, results.Check))
    return 0 if sound and right else 1


if __name__ == "__main__":
    sys.exit(main())
