"""Attention of sequences with one new token each: reads the cache once, as fast as memory gives it.

The query heads of a KV head are the rows of one tile, so no key is read twice.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.interface import AttentionSpec, GroupBatch, StepBatch
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.merge import merge_kernel
from engine.kernels.triton.paged import scales_of, strides_of
from engine.kernels.triton.segments import first_tile, segment_at, segment_ends, share_of
from engine.kernels.triton.softmax import attended, attention_constants, beginning
from engine.kernels.triton.tiles import AttentionTiles, decode_tiles, power_of_two
from kv_cache.slab import KvSlab

MIN_SHARE = 2  # tiles of a program
MERGED_PARTS = 32  # that a program of the second pass holds at a time
LEAST_SEQS = 128  # one for each thread: fewer cost the same, and would be compiled anew


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def decode_kernel(
    q_ptr: tl.tensor,  # [tokens, NUM_HEADS, HEAD_DIM]
    slab_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # the slab as fp32; None: its format has no scales
    sinks_ptr: tl.tensor,  # [NUM_HEADS] fp32; None: there are none
    table_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [tokens, NUM_HEADS, VALUE_DIM]
    partial_ptr: tl.tensor,  # [programs, 2, ROWS, VALUE_DIM] fp32
    stats_ptr: tl.tensor,  # [programs, 2, 2, ROWS] fp32: maxima, then sums
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    k_offset: tl.tensor,
    v_offset: tl.tensor,
    scales_offset: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = NUM_HEADS // KV_HEADS
    CHUNKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS  # of a group too large for one tile
    ends = segment_ends(kv_lens_ptr, num_seqs, SEQS, TOKENS, WINDOW)
    stretch = tl.max(ends, 0)
    line = stretch * (KV_HEADS * CHUNKS)
    share = share_of(line, tl.num_programs(0), MIN_SHARE)
    place = tl.program_id(0) * share
    stop = tl.minimum(place + share, line)
    dims = tl.arange(0, HEAD_BLOCK)[None, :]
    vdims = tl.arange(0, VALUE_BLOCK)[None, :]
    while place < stop:
        chunk = place // stretch
        inner = place - chunk * stretch
        seq, begin, end = segment_at(ends, inner)
        count = tl.minimum(end - inner, stop - place)
        kv_head = chunk // CHUNKS
        members = chunk % CHUNKS * ROWS + tl.arange(0, ROWS)
        heads = (seq.to(tl.int64) * NUM_HEADS + kv_head * GROUP + members)[:, None]
        wanted = (members < GROUP)[:, None]
        kv_len = tl.load(kv_lens_ptr + seq)
        q_mask = wanted & (dims < HEAD_DIM)
        q = tl.load(q_ptr + heads * HEAD_DIM + dims, mask=q_mask, other=0.0)
        own_scales = scales_ptr
        if scales_ptr is not None:
            own_scales = scales_ptr + (scales_offset + kv_head * (head_stride // 4))
        first = first_tile(kv_len, TOKENS, WINDOW) + inner - begin
        sunk = members < tl.where(inner == begin, GROUP, 0)
        highest, total = beginning(sinks_ptr, kv_head * GROUP + members, sunk, ROWS)
        highest, total, acc = attended(
            q, tl.zeros([ROWS], tl.int32) + (kv_len - 1),
            highest, total, tl.zeros([ROWS, VALUE_BLOCK], tl.float32),
            slab_ptr + (k_offset + kv_head * head_stride),
            slab_ptr + (v_offset + kv_head * head_stride),
            own_scales,
            table_ptr + seq.to(tl.int64) * table_stride,
            first, first + count, kv_len, block_stride,
            HEAD_DIM, VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, BLOCK_SIZE, WINDOW, SCALE, INNER,
            PRECISION, TOKENS, True,
        )  # fmt: skip
        v_mask = wanted & (vdims < VALUE_DIM)
        if count == end - begin:
            out = acc / tl.maximum(total, 1.0e-30)[:, None]
            out = out.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + heads * VALUE_DIM + vdims, out, mask=v_mask)
        else:
            # A program holds at most two segments in part: its first, begun by another
            # program, and its last, which the next one goes on with.
            part = tl.program_id(0) * 2 + (inner == begin).to(tl.int32)
            rows = part * ROWS + tl.arange(0, ROWS)
            tl.store(partial_ptr + rows[:, None] * VALUE_DIM + vdims, acc, mask=v_mask)
            tl.store(stats_ptr + rows + part * ROWS, highest)
            tl.store(stats_ptr + rows + part * ROWS + ROWS, total)
        place += count


def decode_launches(
    q: torch.Tensor,
    spec: AttentionSpec,
    slab: KvSlab,
    layer: int,
    batch: StepBatch,
    group: GroupBatch,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    num_programs: int,
    tiles: AttentionTiles | None = None,
) -> tuple[Launch, Launch]:
    """The first `num_decode` sequences, and the merge of what was split."""
    members = spec.num_heads // spec.num_kv_heads
    tiles = tiles or decode_tiles(
        members, spec.head_dim, spec.value_dim, q.element_size(), slab.layout.format.quantised
    )
    constants = attention_constants(spec, slab, tiles)
    constants |= {"SEQS": max(power_of_two(batch.num_decode), LEAST_SEQS), "MIN_SHARE": MIN_SHARE}
    rows, tables = num_programs * 2 * tiles.rows, group.block_tables
    partial = torch.empty(rows * spec.value_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows * 2, dtype=torch.float32, device=q.device)
    args = (
        q, slab.data, scales_of(slab), sinks, tables, batch.kv_lens, out, partial, stats,
        batch.num_decode, tables.stride(0), *strides_of(slab, layer),
    )  # fmt: skip
    merge_args = (partial, stats, batch.kv_lens, out, batch.num_decode, num_programs)
    merge_constants = {
        name: constants[name] for name in merge_kernel.arg_names if name in constants
    } | {"PARTS": MERGED_PARTS}
    return (
        Launch(decode_kernel, (num_programs,), args, constants, tiles.num_warps, tiles.num_stages),
        Launch(merge_kernel, (num_programs, min(members, tiles.rows)), merge_args, merge_constants),
    )
