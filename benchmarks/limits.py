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
    several times as long for that as MKL does for fp32, to which bf16 is widened for nothing."""
    x = torch.randn(GEMM_SIZE, GEMM_SIZE)
    short = x.bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(short, GEMM_SIZE)

    def in_bf16() -> object:
        return torch.ops.mkldnn._linear_pointwise(short, packed, None, "none", [], "")

    def in_fp32() -> object:
        return x @ x

    return float(2 * GEMM_SIZE**3 / min(_median_s(in_bf16), _median_s(in_fp32)))


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
