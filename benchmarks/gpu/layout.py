"""What it costs that a block's layers lie together: the same attention over a slab for each layer.

A pool that nearly fills the card, blocks in random order: 2 MiB pages of far-apart blobs against
dense slabs, so that address translation shows.
"""

from functools import partial

from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.decode_attention import (
    BLOCK_SIZE,
    LLAMA,
    SMOKE_SPEC,
    attend,
    full_cache,
    kv_bytes,
)
from benchmarks.gpu.inputs import (
    Paged,
    layout_of,
    num_blocks,
    paged,
    random_queries,
    random_slab,
)
from engine.kernels.triton.kernels import TritonKernels


def run(bench: Bench) -> None:
    spec, kernels = SMOKE_SPEC if bench.smoke else LLAMA, bench.kernels()
    num_seqs, context, layers = (2, 40, 2) if bench.smoke else (96, 8192, 32)
    num_bytes = kv_bytes(spec, context, bench.dtype) * layers
    num_seqs = bench.fitting(num_seqs, num_bytes)
    q = random_queries(spec, num_seqs, bench.dtype, bench.device)
    together = full_cache(bench, spec, num_seqs, context, layers)
    blob_s = bench.seconds(partial(attend, kernels, q, spec, together, layers)) / layers
    del together
    free_memory()
    lengths = [(1, context)] * num_seqs
    layout, count = layout_of(spec, 1, BLOCK_SIZE, bench.dtype), num_blocks(lengths, BLOCK_SIZE)
    first = paged(random_slab(layout, count, bench.device), lengths)
    apart = [first] + [
        Paged(random_slab(layout, count, bench.device), first.batch) for _ in range(layers - 1)
    ]

    def attend_apart(kernels: TritonKernels = kernels) -> None:
        for made in apart:
            kernels.attention(q, spec, made.slab, 0, made.batch, made.group)

    slabs_s = bench.seconds(attend_apart) / layers
    limit_s = kv_bytes(spec, num_seqs * context, bench.dtype) / bench.limits.read_bytes_s
    case = f"B {num_seqs} at {context}, {layers} layers"
    bench.figure(f"{case}, block-major blobs, a layer", "us", blob_s * 1e6, limit=limit_s * 1e6)
    bench.figure(f"{case}, a slab a layer, a layer", "us", slabs_s * 1e6, limit=limit_s * 1e6)
    bench.figure(
        f"{case}, time of blobs over slabs", "x", blob_s / slabs_s, share=blob_s / slabs_s,
        share_of="slabs a layer",
    )  # fmt: skip
