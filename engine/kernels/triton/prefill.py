"""Causal attention of sequences with several new tokens over all of their cached ones.

The query heads of a KV head lie side by side in the rows of a tile: row r is token r // GROUP
of the tile, head r % GROUP. Few tokens then still fill the matrix unit.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.interface import AttentionSpec, GroupBatch, StepBatch
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.paged import scales_of, strides_of
from engine.kernels.triton.softmax import attended, attention_constants, beginning
from engine.kernels.triton.tiles import AttentionTiles, prefill_tiles
from kv_cache.slab import KvSlab


@triton.jit
def row_places(
    ptr: tl.tensor,  # [tokens, NUM_HEADS, WIDTH]
    first_token: tl.tensor,  # of row 0
    first_head: tl.tensor,
    rows: tl.tensor,
    NUM_HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Pointers to where every row begins, [rows, 1]; 64-bit is what they have in common."""
    start = ptr + (first_token.to(tl.int64) * NUM_HEADS + first_head) * WIDTH
    return start + ((rows + rows // MEMBERS * (NUM_HEADS - MEMBERS)) * WIDTH)[:, None]


@triton.jit(do_not_specialize=["first_seq", "table_stride"])
def prefill_kernel(
    q_ptr: tl.tensor,  # [tokens, NUM_HEADS, HEAD_DIM]
    slab_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # the slab as fp32; None: its format has no scales
    sinks_ptr: tl.tensor,  # [NUM_HEADS] fp32; None: there are none
    table_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [tokens, NUM_HEADS, VALUE_DIM]
    first_seq: tl.tensor,
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
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Program (sequence and KV head, tile of queries); later queries see more and go first."""
    MEMBERS: tl.constexpr = min(NUM_HEADS // KV_HEADS, ROWS)
    CHUNKS: tl.constexpr = (NUM_HEADS // KV_HEADS + MEMBERS - 1) // MEMBERS
    QUERIES: tl.constexpr = ROWS // MEMBERS
    chunk = tl.program_id(0) % (KV_HEADS * CHUNKS)
    seq = first_seq + tl.program_id(0) // (KV_HEADS * CHUNKS)
    first_query = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    query_start = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - query_start
    if first_query >= num_queries:
        return
    kv_len = tl.load(kv_lens_ptr + seq)
    kv_head = chunk // CHUNKS
    rows = tl.arange(0, ROWS)
    num_rows = tl.minimum(num_queries - first_query, QUERIES) * MEMBERS
    if CHUNKS > 1:
        num_rows = tl.minimum(num_rows, NUM_HEADS // KV_HEADS - chunk % CHUNKS * MEMBERS)
    first_token = query_start + first_query
    first_head = kv_head * (NUM_HEADS // KV_HEADS) + chunk % CHUNKS * MEMBERS
    dims, vdims = tl.arange(0, HEAD_BLOCK)[None, :], tl.arange(0, VALUE_BLOCK)[None, :]
    q_rows = row_places(q_ptr, first_token, first_head, rows, NUM_HEADS, MEMBERS, HEAD_DIM)
    q_mask = (rows < num_rows)[:, None] & (dims < HEAD_DIM)
    q = tl.load(q_rows + dims, mask=q_mask, other=0.0)
    k_ptr = slab_ptr + (k_offset + kv_head * head_stride)
    v_ptr = slab_ptr + (v_offset + kv_head * head_stride)
    own_scales = scales_ptr
    if scales_ptr is not None:
        own_scales = scales_ptr + (scales_offset + kv_head * (head_stride // 4))
    row_ptr = table_ptr + seq.to(tl.int64) * table_stride
    lowest = kv_len - num_queries + first_query
    end = tl.cdiv(tl.minimum(lowest + QUERIES, kv_len), TOKENS)
    highest, total = beginning(sinks_ptr, first_head + rows % MEMBERS, rows < num_rows, ROWS)
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    positions = lowest + rows // MEMBERS
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // TOKENS
    else:
        begin = (lowest + 1) // TOKENS
        highest, total, acc = attended(
            q, positions, highest, total, acc, k_ptr, v_ptr, own_scales, row_ptr, 0, begin,
            kv_len, block_stride, HEAD_DIM, VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK,
            BLOCK_SIZE, WINDOW, SCALE, INNER, PRECISION, TOKENS, False,
        )  # fmt: skip
    highest, total, acc = attended(
        q, positions, highest, total, acc, k_ptr, v_ptr, own_scales, row_ptr, begin, end,
        kv_len, block_stride, HEAD_DIM, VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK,
        BLOCK_SIZE, WINDOW, SCALE, INNER, PRECISION, TOKENS, True,
    )  # fmt: skip
    inverse = 1.0 / tl.maximum(total, 1.0e-30)  # a division of each element takes registers
    out = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
    # No length is below 0, but the compiler does not know that. It would compute places once, and
    # keep a dozen registers of them through the loops, which have none to spare.
    zero = tl.minimum(kv_len, 0)
    first_token += zero
    rows = (rows + zero) & (ROWS - 1)  # a small number: by it a division is one product
    out_rows = row_places(out_ptr, first_token, first_head, rows, NUM_HEADS, MEMBERS, VALUE_DIM)
    out_mask = (rows < num_rows)[:, None] & (vdims < VALUE_DIM)
    tl.store(out_rows + vdims, out, mask=out_mask)


def prefill_launch(
    q: torch.Tensor,
    spec: AttentionSpec,
    slab: KvSlab,
    layer: int,
    batch: StepBatch,
    group: GroupBatch,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    tiles: AttentionTiles | None = None,
) -> Launch:
    """All sequences after the first `num_decode`."""
    members = spec.num_heads // spec.num_kv_heads
    num_rows = batch.max_query_len * members
    tiles = tiles or prefill_tiles(
        num_rows, spec.head_dim, spec.value_dim, q.element_size(), slab.layout.format.quantised
    )
    members = min(members, tiles.rows)
    chunks = spec.num_kv_heads * -(-spec.num_heads // (spec.num_kv_heads * members))
    query_tiles = -(-batch.max_query_len // (tiles.rows // members))
    args = (
        q, slab.data, scales_of(slab), sinks, group.block_tables, batch.query_starts,
        batch.kv_lens, out, batch.num_decode, group.block_tables.stride(0),
        *strides_of(slab, layer),
    )  # fmt: skip
    return Launch(
        prefill_kernel,
        ((batch.num_seqs - batch.num_decode) * chunks, query_tiles),
        args,
        attention_constants(spec, slab, tiles),
        tiles.num_warps,
        tiles.num_stages,
    )
