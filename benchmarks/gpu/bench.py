"""What a part is given: the device, the shapes to use, the limits so far, where results go."""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.bounds import Limits
from benchmarks.gpu import results
from benchmarks.gpu.results import Check, Figure
from benchmarks.workloads import ModelShape
from engine.kernels.triton.kernels import TritonKernels

LLAMA_8B = ModelShape("llama-3.1-8b", 4096, 32, 32, 8, 14336, 128256)
SMOKE_MODEL = ModelShape("smoke", 64, 1, 4, 2, 96, 256)

# where the part that measures them was left out or failed: what earlier runs on an H200 showed
ASSUMED_LIMITS = Limits(read_bytes_s=4.3e12, gemm_flops_s=790e12)
LIMITS_PART, COPY, GEMM = "limits", "device copy, read and written", "bf16 product of 8192"
SMOKE_PROGRAMS = 3
SPARE_BYTES = 4 << 30  # of the card, for steps, checks and recorded graphs


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Bench:
    """`smoke` asks for the smallest shapes that reach every line."""

    part: str
    smoke: bool
    folder: Path  # of all parts' results, one file for each
    ends_s: float  # of time.monotonic

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if interpreted() else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        """The interpreter has no bf16 products."""
        return torch.float32 if interpreted() else torch.bfloat16

    @property
    def half(self) -> torch.dtype:
        return torch.float16 if interpreted() else torch.bfloat16

    @property
    def shape(self) -> ModelShape:
        return SMOKE_MODEL if self.smoke else LLAMA_8B

    @property
    def seconds_left(self) -> float:
        return self.ends_s - time.monotonic()

    def kernels(self) -> TritonKernels:
        if interpreted():
            return TritonKernels(SMOKE_PROGRAMS)
        return TritonKernels.for_device(self.device)

    @property
    def limits(self) -> Limits:
        found = {
            f.name: f.value
            for f in results.read(self.folder / f"{LIMITS_PART}.jsonl")
            if isinstance(f, Figure)
        }
        if COPY not in found or GEMM not in found:
            self.say("limits were not measured in this run, those of an earlier one are assumed")
            return ASSUMED_LIMITS
        return Limits(found[COPY] * 1e9, found[GEMM] * 1e12)

    def earlier(self, part: str, name: str) -> float | None:
        """A figure of a part that has run before."""
        for result in results.read(self.folder / f"{part}.jsonl"):
            if isinstance(result, Figure) and result.name == name:
                return result.value
        return None

    def fitting(self, wanted: int, seq_bytes: int) -> int:
        """So many of the wanted sequences as the card has memory for."""
        if self.device.type == "cpu":
            return wanted
        count = min(wanted, (torch.cuda.mem_get_info()[0] - SPARE_BYTES) // seq_bytes)
        if count < wanted:
            self.say(f"{count} sequences instead of {wanted}: the card has no memory for more")
        return count

    def figure(
        self,
        name: str,
        unit: str,
        value: float,
        *,
        limit: float | None = None,
        share: float | None = None,
        share_of: str = "limit",
        goal: float | None = None,
        goal_is_most: bool = False,
    ) -> None:
        """With a limit, lower is better, and the share is of that."""
        if share is None and limit is not None:
            share = limit / value
        figure = Figure(
            self.part, name, unit, value, limit, share, share_of, goal, goal_is_most
        )  # fmt: skip
        results.append(self.folder / f"{self.part}.jsonl", figure)
        self.say(f"{name}: {value:.4g} {unit}" + ("" if share is None else f", {share:.1%}"))

    def check(self, name: str, error: float, bound: float) -> None:
        check = Check(self.part, name, float(error), bound)
        results.append(self.folder / f"{self.part}.jsonl", check)
        self.say(f"{name}: error {error:.2g}, {'passed' if check.passed else 'FAILED'}")

    def say(self, text: str) -> None:
        print(f"[{self.part}] {text}", file=sys.stderr, flush=True)

    def seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Median of one call. On a GPU the call is recorded and replayed, so that the time is
        the device's and not that of launching; it must touch more than caches hold."""
        if self.device.type == "cpu":
            return _on_host(run)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(2):
            graph.replay()
        return _median(lambda: device_seconds(graph.replay), repeats)

    def seconds_of_calls(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Median by the host's clock, launching and waiting included."""

        def once() -> float:
            synchronize(self.device)
            started = time.perf_counter()
            run()
            synchronize(self.device)
            return time.perf_counter() - started

        if not self.smoke:
            once()
            once()
        return _median(once, 1 if self.smoke else repeats)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(run: Callable[[], object]) -> float:
    start, end = _event(), _event()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _on_host(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _median(measure: Callable[[], float], repeats: int) -> float:
    return statistics.median(measure() for _ in range(repeats))


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||, in fp64; NaN where one is."""
    out, expected = out.double(), expected.double().to(out.device)
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))
