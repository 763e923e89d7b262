"""Keys and values to their slots, for models that rotate by themselves."""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import Launch
from engine.kernels.triton.paged import scales_of, strides_of
from engine.kernels.triton.quantise import highest_of, scale_of, stored_as
from engine.kernels.triton.tiles import power_of_two
from kv_cache.slab import KvSlab

PART_ELEMENTS = 2048  # of the heads that one program writes


@triton.jit
def scale_place(
    scales_ptr: tl.tensor,  # the slab as fp32
    slot: tl.tensor,
    block_stride: tl.tensor,
    scales_offset: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """The scale of head 0's keys of a token; that of its values lies BLOCK_SIZE on."""
    block = scales_ptr + slot // BLOCK_SIZE * (block_stride // 4)
    return block + scales_offset + slot % BLOCK_SIZE


@triton.jit
def store_rows(
    rows_ptr: tl.tensor,  # one token's rows, [heads, WIDTH]
    place_ptr: tl.tensor,  # head 0's row in the slab
    first: tl.tensor,  # the first of HEADS_BLOCK heads to store
    limit: tl.tensor,  # and one behind the last; 0 stores none
    head_stride: tl.tensor,
    scales_ptr: tl.tensor,  # head 0's scale of the row; None: there are none
    HEADS_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    heads = first + tl.arange(0, HEADS_BLOCK)[:, None]
    cols = tl.arange(0, WIDTH_BLOCK)[None, :]
    inside = (heads < limit) & (cols < WIDTH)
    kind = place_ptr.dtype.element_ty
    rows = tl.load(rows_ptr + heads * WIDTH + cols, mask=inside, other=0.0)
    if scales_ptr is not None:
        rows = rows.to(tl.float32)
        scale = scale_of(highest_of(rows), LARGEST)
        tl.store(scales_ptr + heads * (head_stride // 4), scale[:, None], mask=heads < limit)
        rows = stored_as(rows, scale, LARGEST, kind)
    tl.store(place_ptr + heads * head_stride + cols, rows.to(kind), mask=inside)


@triton.jit
def write_kernel(
    k_ptr: tl.tensor,  # [tokens, KV_HEADS, HEAD_DIM]
    v_ptr: tl.tensor,  # [tokens, KV_HEADS, VALUE_DIM]
    slots_ptr: tl.tensor,
    slab_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # the slab as fp32; None: its format has no scales
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    k_offset: tl.tensor,
    v_offset: tl.tensor,
    scales_offset: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    base = slab_ptr + slot // BLOCK_SIZE * block_stride
    first = tl.program_id(1) * HEADS_BLOCK
    limit = tl.where(slot < 0, 0, KV_HEADS)
    k_scales = scales_ptr
    v_scales = scales_ptr
    if scales_ptr is not None:
        k_scales = scale_place(scales_ptr, slot, block_stride, scales_offset, BLOCK_SIZE)
        v_scales = k_scales + BLOCK_SIZE
    store_rows(
        k_ptr + token * KV_HEADS * HEAD_DIM, base + k_offset + slot % BLOCK_SIZE * HEAD_DIM,
        first, limit, head_stride, k_scales, HEADS_BLOCK, HEAD_DIM, HEAD_BLOCK, LARGEST,
    )  # fmt: skip
    store_rows(
        v_ptr + token * KV_HEADS * VALUE_DIM, base + v_offset + slot % BLOCK_SIZE * VALUE_DIM,
        first, limit, head_stride, v_scales, HEADS_BLOCK, VALUE_DIM, VALUE_BLOCK, LARGEST,
    )  # fmt: skip


def write_launch(
    k: torch.Tensor, v: torch.Tensor, slab: KvSlab, layer: int, slots: torch.Tensor
) -> Launch:
    tokens, kv_heads, head_dim = k.shape
    value_dim = v.shape[-1]
    heads_that_fit = max(PART_ELEMENTS // power_of_two(max(head_dim, value_dim)), 1)
    heads_block = min(power_of_two(kv_heads), heads_that_fit)
    return Launch(
        write_kernel,
        (tokens, -(-kv_heads // heads_block)),
        (k, v, slots, slab.data, scales_of(slab), *strides_of(slab, layer)),
        {
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_SIZE": slab.layout.block_size,
            "HEADS_BLOCK": heads_block,
            "HEAD_BLOCK": power_of_two(head_dim),
            "VALUE_BLOCK": power_of_two(value_dim),
            "LARGEST": slab.layout.format.largest,
        },
    )
