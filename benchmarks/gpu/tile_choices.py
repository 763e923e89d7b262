"""Other tiles for both attention kernels: what a next change should begin with.

Results are checked before they are timed; a choice that does not compile or fit is named in the
log and left out.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu.bench import Bench, free_memory, relative_error
from benchmarks.gpu.decode_attention import (
    BOUND,
    LLAMA,
    SMOKE_SPEC,
    full_cache,
    kv_bytes,
)
from benchmarks.gpu.inputs import random_queries
from benchmarks.gpu.prefill_attention import LAYER, least_s, one_prompt
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
# 128 x 64 with 4 warps and 256 x 64 with 8 spill
PREFILL = (
    AttentionTiles(128, 128, 8, 2),
    AttentionTiles(128, 128, 8, 3),
    AttentionTiles(128, 64, 8, 2),
    AttentionTiles(128, 64, 8, 3),
    AttentionTiles(128, 64, 8, 4),
    AttentionTiles(64, 64, 4, 2),
    AttentionTiles(64, 64, 4, 3),
    AttentionTiles(64, 128, 4, 2),
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
    q = random_queries(spec, num_seqs, bench.dtype, bench.device)
    out = torch.empty_like(q)
    members = spec.num_heads // spec.num_kv_heads
    usual = decode_tiles(members, spec.head_dim, spec.value_dim, bench.dtype.itemsize)
    limit_s = kv_bytes(spec, num_seqs * context, bench.dtype) / bench.limits.read_bytes_s

    def attend(tiles: AttentionTiles, num_programs: int) -> None:
        for layer in range(layers):
            for launch in decode_launches(
                q, spec, made.slab, layer, made.batch, made.group, None, out, num_programs, tiles
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
    q, made = one_prompt(bench, spec, length, length)
    out = torch.empty_like(q)
    limit_s = least_s(bench, spec, length, length)
    usual = prefill_tiles(length * 4, spec.head_dim, spec.value_dim, bench.dtype.itemsize)

    def attend(tiles: AttentionTiles) -> None:
        prefill_launch(q, spec, made.slab, LAYER, made.batch, made.group, None, out, tiles).run()

    expected = _result(bench, out, lambda: attend(usual))
    for tiles in PREFILL[-3:-2] if bench.smoke else PREFILL:
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
