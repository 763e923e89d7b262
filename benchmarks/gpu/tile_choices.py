"""Other tiles for both attention kernels: what a next change should begin with.

Results are checked before they are timed; a choice that does not compile or fit is named in the
log and left out.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu.bench import Bench, free_memory, relative_error
from benchmarks.gpu.decode_attention import (
    BLOCK_SIZE,
    BOUND,
    LLAMA,
    SMOKE_SPEC,
    full_cache,
    kv_bytes,
)
from benchmarks.gpu.inputs import Paged, layout_of, num_blocks, paged, random_slab
from benchmarks.gpu.prefill_attention import flops
from engine.kernels.interface import AttentionSpec
from engine.kernels.triton.decode import decode_launches
from engine.kernels.triton.prefill import prefill_launch
from engine.kernels.triton.tiles import AttentionTiles, decode_tiles, prefill_tiles

# (tokens, warps, stages, programs for each multiprocessor)
DECODE = tuple(product((32, 64), (4,), (2, 3, 4), (2,))) + (
    (64, 8, 3, 2),
    (128, 4, 2, 1),
    (128, 4, 3, 1),
    (128, 8, 3, 1),
    (32, 4, 4, 3),
    (32, 4, 3, 4),
    (16, 4, 6, 4),
)
# (rows, tokens, warps, stages); 128 x 64 with 4 warps and 256 x 64 with 8 spill
PREFILL = (
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
)
MULTIPROCESSORS = 132


def run(bench: Bench) -> None:
    spec = SMOKE_SPEC if bench.smoke else LLAMA
    for num_seqs, context in ((2, 40),) if bench.smoke else ((64, 2048), (64, 8192)):
        _decode(bench, spec, num_seqs, context)
        free_memory()
    for length in (20,) if bench.smoke else (2048, 8192):
        _prefill(bench, spec, length)


def _decode(bench: Bench, spec: AttentionSpec, num_seqs: int, context: int) -> None:
    layers = 1 if bench.smoke else 8
    made = full_cache(bench, spec, num_seqs, context, layers)
    q = torch.randn(num_seqs, spec.num_heads, spec.head_dim, device=bench.device)
    q = q.to(bench.dtype)
    out = torch.empty_like(q)
    members = spec.num_heads // spec.num_kv_heads
    usual = decode_tiles(members, spec.head_dim, spec.value_dim, bench.dtype.itemsize)
    limit_s = kv_bytes(spec, num_seqs * context, bench.dtype) / bench.limits.read_bytes_s

    def attend(tiles: AttentionTiles, num_programs: int) -> None:
        for layer in range(layers):
            for launch in decode_launches(
                q, spec, made.slab, layer, made.batch, made.group, out, num_programs, tiles
            ):
                launch.run()

    multiprocessors = 1 if bench.smoke else MULTIPROCESSORS
    expected = _result(bench, out, lambda: attend(usual, 2 * multiprocessors))
    for tokens, warps, stages, each in DECODE[:1] if bench.smoke else DECODE:
        tiles = AttentionTiles(usual.rows, tokens, warps, stages)
        name = f"decode, B {num_seqs} at {context}: {tokens} tokens, {warps} warps, {stages} stages"
        programs = each * multiprocessors

        choice = partial(attend, tiles, programs)

        _try(bench, f"{name}, {each} programs", choice, out, expected, limit_s, layers)


def _prefill(bench: Bench, spec: AttentionSpec, length: int) -> None:
    lengths = [(length, length)]
    layout = layout_of(spec, 1, BLOCK_SIZE, bench.dtype)
    made = paged(random_slab(layout, num_blocks(lengths, BLOCK_SIZE), bench.device), lengths)
    q = torch.randn(length, spec.num_heads, spec.head_dim, device=bench.device).to(bench.dtype)
    out = torch.empty_like(q)
    limit_s = flops(spec, length, length) / bench.limits.gemm_flops_s
    usual = prefill_tiles(length * 4, spec.head_dim, spec.value_dim, bench.dtype.itemsize)

    def attend(tiles: AttentionTiles, made: Paged = made) -> None:
        prefill_launch(q, spec, made.slab, 0, made.batch, made.group, out, tiles).run()

    expected = _result(bench, out, lambda: attend(usual))
    choices: Iterator[AttentionTiles] = (
        AttentionTiles(*sizes) for sizes in (PREFILL[-3:-2] if bench.smoke else PREFILL)
    )
    for tiles in choices:
        rows, tokens, warps, stages = tiles
        name = f"prefill of {length}: {rows} x {tokens}, {warps} warps, {stages} stages"
        _try(bench, name, partial(attend, tiles), out, expected, limit_s, 1)


def _result(bench: Bench, out: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
    run()
    return out.clone()


def _try(
    bench: Bench,
    name: str,
    run: Callable[[], None],
    out: torch.Tensor,
    expected: torch.Tensor,
    limit_s: float,
    calls: int,
) -> None:
    if bench.seconds_left < 0:
        bench.say(f"no time for {name}")
        return
    out.fill_(torch.nan)
    try:
        run()
    except OutOfResources as error:
        bench.say(f"{name}: {error}")
        return
    bench.check(name, relative_error(out, expected), BOUND[bench.dtype])
    seconds = bench.seconds(run, 5) / calls
    bench.figure(name, "us", seconds * 1e6, limit=limit_s * 1e6)
