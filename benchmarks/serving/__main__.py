"""A whole cluster through HTTP, side by side with the peers'.

    python -m benchmarks.serving --vllm-python VENV/bin/python [--work-dir DIR] [--json FILE]

In every turn each system is started, asked for all that its parts ask, and ended before the next
one starts: none takes cores from another, and a drift of the machine meets all of them. So there
are as many starts of each, and as many figures, as there are `--repeats`.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from benchmarks import machine
from benchmarks.handoff import as_text
from benchmarks.model_folder import write_model
from benchmarks.servers import ServerError
from benchmarks.serving import goals
from benchmarks.serving.loads import LoadError, warm_up
from benchmarks.serving.parts import PARTS, Turn
from benchmarks.serving.processes import ForeignCpu
from benchmarks.serving.results import Measured, Results
from benchmarks.serving.systems import SYSTEMS, Place, System
from benchmarks.sides import add_vllm_arguments, chosen_vllm
from benchmarks.tokenizer_folder import write_tokenizer
from benchmarks.workloads import SHAPES, ModelShape


class Benchmark:
    """One run of it: `results` fills as it goes, and says what it has even if a peer fails."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.results = Results()
        self._arguments = arguments
        self._folder = folder
        self._seeds = count()  # no two loads ask the same prompts

    def run(self) -> None:
        for turn in range(self._arguments.repeats):
            for shape in SHAPES.values():
                for name, system in SYSTEMS.items():
                    if parts := self._parts(name, shape):
                        self._stay(system, self._place(shape), parts, turn)

    def _parts(self, name: str, shape: ModelShape) -> list[str]:
        if self._arguments.systems and name not in self._arguments.systems:
            return []
        if SYSTEMS[name].needs_vllm and not chosen_vllm(self._arguments):
            return []
        asked = self._arguments.part or PARTS
        return [
            part
            for part, what in PARTS.items()
            if part in asked and what.shape == shape and name in what.systems
        ]

    def _place(self, shape: ModelShape) -> Place:
        model = self._folder / "models" / shape.name
        if not (model / "tokenizer.json").exists():
            write_model(model, shape)
            write_tokenizer(model, shape.vocab_size)
        return Place(shape, model, self._folder, chosen_vllm(self._arguments))

    def _stay(self, system: System, place: Place, parts: Sequence[str], turn: int) -> None:
        began = time.perf_counter()
        try:
            with system.running(place) as running:
                _tell(f"turn {turn}: {system.name}, {place.shape.name}: {running.start_s:.1f} s")
                foreign = ForeignCpu(running.family)
                warm_up(running, next(self._seeds))
                here = Turn(system, place, running, self._seeds, self._arguments.quick)
                for part in parts:
                    for figures in PARTS[part].measure(here):
                        measured = Measured(part, system.name, turn, figures)
                        self.results.measured.append(measured)
                        _tell(f"  {part}, {figures.case}: {_line(figures.values)}")
                self.results.foreign.append(foreign.share())
        except (ServerError, LoadError) as error:
            self.results.failures.append(f"turn {turn}: {system.name}: {error}")
            _tell(self.results.failures[-1])
        _tell(f"  in all {time.perf_counter() - began:.0f} s")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _line(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.4g}" for name, value in values.items())


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_vllm_arguments(parser)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="default: all there are")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few requests; no figures to keep")
    parser.add_argument("--work-dir", type=Path, help="keeps models and logs")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _show(results: Results, about: dict[str, object]) -> None:
    print(about["command"])
    print("machine:", ", ".join(f"{k} {v}" for k, v in machine.describe().items()))
    if results.foreign:
        print(f"other processes took at most {max(results.foreign):.0%} of the CPU meanwhile")
    for part in results.parts():
        print(f"\n{part}\n{as_text(list(results.rows(part)))}")
    if held := list(goals.rows(results)):
        print(f"\ngoals\n{as_text(held)}")
    for failure in results.failures:
        print(f"\nFAILED {failure}")


def main() -> None:
    arguments = _parsed()
    os.environ.pop("RAY_ADDRESS", None)  # every system starts a Ray of its own
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and ends it then, too
    command = " ".join(["python -m benchmarks.serving", *sys.argv[1:]])
    about: dict[str, object] = {"command": command, "machine": machine.describe()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.work_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        benchmark = Benchmark(arguments, folder.resolve())
        try:
            benchmark.run()
        finally:
            _show(benchmark.results, about)
            if arguments.json:
                text = json.dumps(benchmark.results.as_json(**about), indent=1)
                arguments.json.write_text(text)
    sys.exit(bool(benchmark.results.failures))


if __name__ == "__main__":
    main()
