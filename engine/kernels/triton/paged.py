"""Where the tokens of a tile lie in a slab, for the attention kernels. 64-bit throughout."""

from typing import NamedTuple

import triton
import triton.language as tl

from kv_cache.slab import KvSlab


class SlabStrides(NamedTuple):
    """Elements, as a kernel takes them; the offsets are those of one layer's two planes."""

    block: int
    head: int
    keys: int
    values: int


def strides_of(slab: KvSlab, layer: int) -> SlabStrides:
    start = layer * slab.layer_stride
    keys, values = slab.plane_offsets
    return SlabStrides(slab.block_stride, slab.head_stride, start + keys, start + values)


@triton.jit
def tile_rows(
    head_ptr: tl.tensor,  # the slab, moved on to the KV head
    table_ptr: tl.tensor,  # the sequence's block table
    first: tl.tensor,  # first token of the tile, a multiple of TOKENS
    kv_len: tl.tensor,
    block_stride: tl.tensor,
    k_offset: tl.tensor,
    v_offset: tl.tensor,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Pointers to the key row and the value row of every token, [TOKENS] each.

    Those of tokens from kv_len on point anywhere; they must not be loaded from.
    """
    if TOKENS <= BLOCK_SIZE:  # one block holds the tile: one scalar base
        block = tl.load(table_ptr + first // BLOCK_SIZE, mask=first < kv_len, other=0)
        base = head_ptr + block.to(tl.int64) * block_stride
        inside = first % BLOCK_SIZE + tl.arange(0, TOKENS)
    else:
        tokens = first + tl.arange(0, TOKENS)
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < kv_len, other=0)
        base = head_ptr + blocks.to(tl.int64) * block_stride
        inside = tokens % BLOCK_SIZE
    return base + (k_offset + inside * HEAD_DIM), base + (v_offset + inside * VALUE_DIM)


@triton.jit
def load_rows(
    rows: tl.tensor,  # [TOKENS] pointers
    valid: tl.tensor,  # [TOKENS]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,  # false: every row is valid
) -> tl.tensor:
    """[TOKENS, BLOCK], zero where there is nothing."""
    cols = tl.arange(0, BLOCK)[None, :]
    if MASKED and WIDTH < BLOCK:
        return tl.load(rows[:, None] + cols, mask=valid[:, None] & (cols < WIDTH), other=0.0)
    if MASKED:
        return tl.load(rows[:, None] + cols, mask=valid[:, None], other=0.0)
    if WIDTH < BLOCK:
        return tl.load(rows[:, None] + cols, mask=cols < WIDTH, other=0.0)
    return tl.load(rows[:, None] + cols)
