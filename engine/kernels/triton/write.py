"""Keys and values to their slots, for models that rotate by themselves."""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import Launch
from engine.kernels.triton.paged import strides_of
from engine.kernels.triton.tiles import power_of_two
from kv_cache.slab import KvSlab

PART_ELEMENTS = 2048  # of the heads that one program writes


@triton.jit
def store_rows(
    rows_ptr: tl.tensor,  # one token's rows, [heads, WIDTH]
    place_ptr: tl.tensor,  # head 0's row in the slab
    first: tl.tensor,  # the first of HEADS_BLOCK heads to store
    limit: tl.tensor,  # and one behind the last; 0 stores none
    head_stride: tl.tensor,
    HEADS_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
) -> None:
    heads = first + tl.arange(0, HEADS_BLOCK)[:, None]
    cols = tl.arange(0, WIDTH_BLOCK)[None, :]
    inside = (heads < limit) & (cols < WIDTH)
    rows = tl.load(rows_ptr + heads * WIDTH + cols, mask=inside)
    rows = rows.to(place_ptr.dtype.element_ty)
    tl.store(place_ptr + heads * head_stride + cols, rows, mask=inside)


@triton.jit
def write_kernel(
    k_ptr: tl.tensor,  # [tokens, KV_HEADS, HEAD_DIM]
    v_ptr: tl.tensor,  # [tokens, KV_HEADS, VALUE_DIM]
    slots_ptr: tl.tensor,
    slab_ptr: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    k_offset: tl.tensor,
    v_offset: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    base = slab_ptr + slot // BLOCK_SIZE * block_stride
    first = tl.program_id(1) * HEADS_BLOCK
    limit = tl.where(slot < 0, 0, KV_HEADS)
    store_rows(
        k_ptr + token * KV_HEADS * HEAD_DIM, base + k_offset + slot % BLOCK_SIZE * HEAD_DIM,
        first, limit, head_stride, HEADS_BLOCK, HEAD_DIM, HEAD_BLOCK,
    )  # fmt: skip
    store_rows(
        v_ptr + token * KV_HEADS * VALUE_DIM, base + v_offset + slot % BLOCK_SIZE * VALUE_DIM,
        first, limit, head_stride, HEADS_BLOCK, VALUE_DIM, VALUE_BLOCK,
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
        (k, v, slots, slab.data, *strides_of(slab, layer)),
        {
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_SIZE": slab.layout.block_size,
            "HEADS_BLOCK": heads_block,
            "HEAD_BLOCK": power_of_two(head_dim),
            "VALUE_BLOCK": power_of_two(value_dim),
        },
    )
