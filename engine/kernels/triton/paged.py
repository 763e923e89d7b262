"""Where the tokens of a tile lie in a slab, for the attention kernels. 64-bit throughout."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kv_cache.slab import KvSlab


class SlabStrides(NamedTuple):
    """Elements, as a kernel takes them; the offsets are those of one layer's two planes.

    Scales are counted in themselves, 4 elements of a byte each: those of the layer's keys begin
    at `scales`, and those of its values right behind.
    """

    block: int
    head: int
    keys: int
    values: int
    scales: int


def strides_of(slab: KvSlab, layer: int) -> SlabStrides:
    start = layer * slab.layer_stride
    keys, values = slab.plane_offsets
    scales = slab.scale_offset(layer, 0) if slab.layout.format.quantised else 0
    return SlabStrides(slab.block_stride, slab.head_stride, start + keys, start + values, scales)


def scales_of(slab: KvSlab) -> torch.Tensor | None:
    return slab.scales if slab.layout.format.quantised else None


@triton.jit
def tile_blocks(
    table_ptr: tl.tensor,  # the sequence's block table
    first: tl.tensor,  # first token of the tile, a multiple of TOKENS
    kv_len: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """The block of a tile that lies inside one, else that of each token, [TOKENS].

    Tokens from kv_len on, which the table may not reach, are said to be in block 0.
    """
    if TOKENS <= BLOCK_SIZE:
        blocks = tl.load(table_ptr + first // BLOCK_SIZE, mask=first < kv_len, other=0)
    else:
        tokens = first + tl.arange(0, TOKENS)
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < kv_len, other=0)
    return blocks


@triton.jit
def tile_rows(
    plane_ptr: tl.tensor,  # the slab, moved on to the plane of one layer and head
    blocks: tl.tensor,
    first: tl.tensor,
    block_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Pointers to the row of every token of a tile, [TOKENS]."""
    inside = (first + tl.arange(0, TOKENS)) % BLOCK_SIZE
    if TOKENS <= BLOCK_SIZE:
        inside = first % BLOCK_SIZE + tl.arange(0, TOKENS)
    return plane_ptr + blocks.to(tl.int64) * block_stride + inside * WIDTH


@triton.jit
def load_scales(
    scales: tl.tensor,  # [TOKENS] pointers
    valid: tl.tensor,
    MASKED: tl.constexpr,
) -> tl.tensor:
    return tl.load(scales, mask=valid, other=0.0) if MASKED else tl.load(scales)


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
    places = rows[:, None] + cols
    if MASKED and WIDTH < BLOCK:
        loaded = tl.load(places, mask=valid[:, None] & (cols < WIDTH), other=0.0)
    elif MASKED:
        loaded = tl.load(places, mask=valid[:, None], other=0.0)
    elif WIDTH < BLOCK:
        loaded = tl.load(places, mask=cols < WIDTH, other=0.0)
    else:
        loaded = tl.load(places)
    return loaded
