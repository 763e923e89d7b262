"""What this machine can do at most: bytes read a second, and multiplications a second.

`python -m benchmarks.limits` measures both, over all cores, and prints them as JSON.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from benchmarks.bounds import Limits
from engine.kernels.cpu.linear import reorders

READ_BYTES = 1 << 29  # far more than any cache holds
GEMM_SIZE = 2048
REPEATS = 9


def measure() -> Limits:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return Limits(_read_rate(), _gemm_rate())


def _median_s(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _read_rate() -> float:
    data = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _median_s(data.sum)


def _gemm_rate() -> float:
    """The fastest that torch multiplies on a CPU. Without instructions for bf16, oneDNN takes
    several times as long for that as MKL does for fp32, to which bf16 is widened for nothing; with
    AVX2 alone it has no bf16 at all."""
    x = torch.randn(GEMM_SIZE, GEMM_SIZE)
    least_s = _median_s(lambda: x @ x)
    if reorders(torch.bfloat16):
        short = x.bfloat16()
        packed = torch.ops.mkldnn._reorder_linear_weight(short, GEMM_SIZE)
        run = torch.ops.mkldnn._linear_pointwise
        least_s = min(least_s, _median_s(lambda: run(short, packed, None, "none", [], "")))
    return float(2 * GEMM_SIZE**3 / least_s)


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
