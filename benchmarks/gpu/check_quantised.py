"""The kernels over quantised caches, with every feature, against the fp32 reference."""

import torch

from benchmarks.gpu.bench import Bench, interpreted
from benchmarks.gpu.check_kernels import (
    SHAPES,
    SMOKE_SHAPES,
    Shape,
    attention,
    dtypes,
    poisoned_outputs,
    writes,
)
from benchmarks.gpu.inputs import QUANTISED

LLAMA = SHAPES[0]
GEMMA = Shape("gemma-2, window 500, cap 50", 16, 8, 256, window=500, soft_cap=50.0)
# conversion and features do not hang on each other: what one format passes, the others do
FEATURES = (
    Shape("heads of 192", 16, 4, 192),
    Shape("heads of 192, values of 128", 16, 16, 192, value_dim=128),
    Shape("blocks of 16, window 100", 32, 8, 128, block_size=16, window=100),
    Shape("one KV head, 80 queries, cap 30", 80, 1, 128, block_size=32, soft_cap=30.0),
)


def run(bench: Bench) -> None:
    kernels = bench.kernels()
    with poisoned_outputs():
        for dtype in dtypes(bench):
            for format in QUANTISED:
                for shape in _shapes(bench, dtype, format):
                    attention(bench, kernels, shape, dtype, format)
                # the interpreter loses a carry where it rounds to fp8
                if format == "int8" or not interpreted():
                    writes(bench, kernels, dtype, format)


def _shapes(bench: Bench, dtype: torch.dtype, format: str) -> tuple[Shape, ...]:
    every = format == QUANTISED[0]
    if bench.smoke:
        return SMOKE_SHAPES if every else SMOKE_SHAPES[:1]
    if dtype == torch.float32:
        return (LLAMA,)
    return (LLAMA, GEMMA, *(FEATURES if every else ()))
