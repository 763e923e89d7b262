"""The engine offline: prompts in, tokens out, beside vLLM and beside the machine's limits.

    python -m benchmarks.engine [--vllm-python VENV/bin/python] [--json FILE]

Each engine runs in a process of its own. They take turns at every workload, one at rest while
the other works, so that a drift of the machine meets both; every figure is the median of the
turns. Engines run with their own defaults and the same size of cache; prompts are random and
never repeat, outputs are greedy and of full length.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine, table
from benchmarks.bounds import Limits
from benchmarks.figures import MEMORY
from benchmarks.process import ROOT, Child
from benchmarks.sides import (
    OURS,
    VLLM,
    Folders,
    SideSpec,
    add_vllm_arguments,
    chosen_vllm,
    ours,
    vllm,
)
from benchmarks.workloads import FIRST_TOKEN, SHAPES, SMALL, START, WORKLOADS, ModelShape

# idle OpenMP threads of the engine before spin for some 0.2 s after their last work
REST_S = 0.5


class Started(NamedTuple):
    seconds: float  # to the first token
    kv_bytes: int


class Benchmark:
    """Takes the measures and keeps them, by workload and engine."""

    def __init__(self, sides: Sequence[SideSpec], folders: Folders, repeats: int) -> None:
        self._sides = sides
        self._folders = folders
        self._repeats = repeats
        self.samples: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.limits: list[Limits] = []
        self.versions: dict[str, str] = {}
        self.foreign_share: list[float] = []  # of the machine's CPU, while each run lasted

    def measure_start(self) -> None:
        """The first start finds nothing compiled, each later one what the one before left."""
        assert self._folders.caches
        for side in self._sides:
            shutil.rmtree(self._folders.caches / side.name, ignore_errors=True)
        firsts = {side.name: self._start(side) for side in self._sides}
        for _ in range(self._repeats):
            for side in self._sides:
                second = self._start(side)
                self.samples[START][side.name].append(
                    {
                        "first_start_s": firsts[side.name].seconds,
                        "second_start_s": second.seconds,
                        "kv_bytes": second.kv_bytes,
                    }
                )

    def _start(self, side: SideSpec) -> Started:
        child = side.start(SMALL, self._folders, settled=False)
        child.ask(FIRST_TOKEN.name, seed=0)
        elapsed = time.perf_counter() - child.started
        child.close()
        kv_bytes = child.info["kv_bytes"]
        _say(
            f"{side.name}: first token {elapsed:.1f} s after the start of its process, with"
            f" {kv_bytes >> 20} MiB of cache"
        )
        return Started(elapsed, kv_bytes)

    def measure(self, shape: ModelShape, names: Sequence[str]) -> None:
        """All turns of the workloads on one model, the engines loaded once."""
        with ExitStack() as stack:
            children = {}
            for side in self._sides:
                children[side.name] = side.start(shape, self._folders, settled=True)
                stack.callback(children[side.name].close)
                self.versions[side.name] = children[side.name].info["version"]
            for name in names:
                for child in children.values():
                    child.ask(name, seed=-1)  # what is slow only once
                for seed in range(self._repeats):
                    for side_name, child in children.items():
                        self._turn(name, side_name, child, seed)
            if shape is SMALL:
                for side_name, child in children.items():
                    answer = child.ask(FIRST_TOKEN.name, seed=1) | child.info
                    self.samples[MEMORY][side_name].append(answer)

    def _turn(self, name: str, side_name: str, child: Child, seed: int) -> None:
        time.sleep(REST_S)
        before, started = machine.CpuTime.now({child.session}), time.perf_counter()
        answer = child.ask(name, seed)
        wall_s = time.perf_counter() - started
        foreign_s = machine.CpuTime.now({child.session}).foreign_since(before)
        self.foreign_share.append(max(0.0, foreign_s / wall_s / len(machine.cores())))
        self.samples[name][side_name].append(answer)
        _say(f"{name}, {side_name}: {answer['total_s']:.3f} s")

    def measure_limits(self) -> None:
        found = subprocess.run(
            [sys.executable, "-m", "benchmarks.limits"], cwd=ROOT, check=True, capture_output=True
        )
        self.limits.append(Limits(**json.loads(found.stdout)))


def _median(limits: Sequence[Limits]) -> Limits:
    return Limits(
        statistics.median(each.read_bytes_s for each in limits),
        statistics.median(each.gemm_flops_s for each in limits),
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    names = [*WORKLOADS, START]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_vllm_arguments(parser)
    parser.add_argument("--only", choices=(OURS, VLLM), help="one engine alone")
    parser.add_argument("--workload", action="append", choices=names, help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each engine")
    parser.add_argument("--json", type=Path, help="where all figures go, with every turn's")
    parser.add_argument("--work-dir", type=Path, help="keeps models and compiled code for later")
    args = parser.parse_args()
    if args.only == VLLM and not args.vllm_python:
        parser.error("--only vllm needs --vllm-python")
    return args


def _run(args: argparse.Namespace, work_dir: Path) -> Benchmark:
    folders = Folders(work_dir / "models", work_dir, work_dir / "caches")
    sides = [] if args.only == VLLM else [ours()]
    if (peer := chosen_vllm(args)) and args.only != OURS:
        sides.append(vllm(peer, machine.cores()))
    wanted = args.workload or [*WORKLOADS, START]
    benchmark = Benchmark(sides, folders, args.repeats)
    for shape in SHAPES.values():
        command = [sys.executable, "-m", "benchmarks.model_folder"]
        subprocess.run(
            [*command, str(folders.models / shape.name), shape.name], cwd=ROOT, check=True
        )
    benchmark.measure_limits()
    if START in wanted:
        benchmark.measure_start()
    for shape in SHAPES.values():
        if names := [n for n in wanted if n != START and WORKLOADS[n].model is shape]:
            benchmark.measure(shape, names)
            benchmark.measure_limits()
    return benchmark


def _result(benchmark: Benchmark) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.engine " + " ".join(sys.argv[1:]),
        "machine": machine.describe(),
        "versions": benchmark.versions,
        "limits": [asdict(each) for each in benchmark.limits],
        "largest_foreign_cpu_share": max(benchmark.foreign_share, default=0.0),
        "figures": table.rows(benchmark.samples, _median(benchmark.limits)),
    }


def _print(result: Mapping[str, Any], limits: Limits) -> None:
    print(result["command"])
    for title in ("machine", "versions"):
        print(f"{title}:", ", ".join(f"{k} {v}" for k, v in result[title].items()))
    print(
        f"limits: reads {limits.read_bytes_s / 1e9:.1f} GB/s,"
        f" multiplications {limits.gemm_flops_s / 1e9:.0f} GFLOP/s"
    )
    foreign = result["largest_foreign_cpu_share"]
    print(f"other processes took at most {foreign:.0%} of the CPU during a run\n")
    print(table.as_text(result["figures"]))


def main() -> None:
    args = _arguments()
    with ExitStack() as stack:
        work_dir = args.work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work_dir = work_dir.absolute()
        work_dir.mkdir(parents=True, exist_ok=True)
        benchmark = _run(args, work_dir)
    result = _result(benchmark)
    _print(result, _median(benchmark.limits))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
