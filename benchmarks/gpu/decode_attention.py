"""The decode attention kernel on full caches: the share of the copy rate it reads at."""

from functools import partial

import torch

from benchmarks.gpu.bench import Bench, free_memory, relative_error
from benchmarks.gpu.inputs import (
    FORMATS,
    Paged,
    layout_of,
    num_blocks,
    paged,
    random_queries,
    random_slab,
)
from engine.kernels.interface import AttentionSpec
from engine.kernels.reference import ReferenceKernels
from engine.kernels.triton.kernels import TritonKernels
from kv_cache.layout import KV_FORMATS

LLAMA = AttentionSpec(32, 8, 128, 128, 128**-0.5)
SMOKE_SPEC = AttentionSpec(4, 2, 16, 16, 0.25)
BLOCK_SIZE = 64
GOAL = 0.85
# (sequences, context, layers): 8 layers of 256 x 8k are as large as 32 layers of 64 x 8k
CASES = ((64, 2048, 32), (64, 8192, 32), (256, 2048, 32), (256, 8192, 8), (1, 2048, 32))
SMOKE_CASES = ((2, 70, 2),)
BOUND = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


def run(bench: Bench) -> None:
    spec, kernels = SMOKE_SPEC if bench.smoke else LLAMA, bench.kernels()
    for num_seqs, context, layers in SMOKE_CASES if bench.smoke else CASES:
        name = f"B {num_seqs} at {context}, {layers} layers"
        made = full_cache(bench, spec, num_seqs, context, layers)
        q = random_queries(spec, num_seqs, bench.dtype, bench.device)
        check(bench, name, kernels, q, spec, made)
        seconds = bench.seconds(partial(attend, kernels, q, spec, made, layers)) / layers
        limit_s = kv_bytes(spec, num_seqs * context, bench.dtype) / bench.limits.read_bytes_s
        goal = GOAL if num_seqs > 1 else None
        bench.figure(f"{name}, a layer", "us", seconds * 1e6, limit=limit_s * 1e6, goal=goal)
        del made, q
        free_memory()


def full_cache(
    bench: Bench,
    spec: AttentionSpec,
    num_seqs: int,
    context: int,
    layers: int,
    format: str | None = None,
) -> Paged:
    lengths = [(1, context)] * num_seqs
    layout = layout_of(spec, layers, BLOCK_SIZE, bench.dtype, format)
    return paged(random_slab(layout, num_blocks(lengths, BLOCK_SIZE), bench.device), lengths)


def kv_bytes(
    spec: AttentionSpec, num_tokens: int, dtype: torch.dtype, format: str | None = None
) -> int:
    """Of one layer, with its scales; queries and results are below a hundredth of that."""
    kv_format = KV_FORMATS[format or FORMATS[dtype]]
    widths = (spec.head_dim, spec.value_dim)
    row_bytes = sum(kv_format.plane_bytes(width) + kv_format.scale_bytes for width in widths)
    return num_tokens * spec.num_kv_heads * row_bytes


def attend(
    kernels: TritonKernels, q: torch.Tensor, spec: AttentionSpec, made: Paged, layers: int
) -> None:
    """All layers one after the other: none finds its keys in a cache of the chip."""
    for layer in range(layers):
        kernels.attention(q, spec, made.slab, layer, made.batch, made.group)


def check(
    bench: Bench,
    name: str,
    kernels: TritonKernels,
    q: torch.Tensor,
    spec: AttentionSpec,
    made: Paged,
) -> None:
    """The last layer: its addresses are the largest."""
    layer = made.slab.layout.num_layers - 1
    out = kernels.attention(q, spec, made.slab, layer, made.batch, made.group)
    expected = ReferenceKernels().attention(
        q.float(), spec, made.slab, layer, made.batch, made.group
    )
    bench.check(name, relative_error(out, expected), BOUND[bench.dtype])
