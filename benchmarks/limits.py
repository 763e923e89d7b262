"""What this machine can do at most: bytes read a second, and bf16 multiplications a second.

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
    """By the fastest route torch has on a CPU: oneDNN on a weight packed beforehand."""
    x = torch.randn(GEMM_SIZE, GEMM_SIZE).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(x, GEMM_SIZE)

    def multiply() -> object:
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    return float(2 * GEMM_SIZE**3 / _median_s(multiply))


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
