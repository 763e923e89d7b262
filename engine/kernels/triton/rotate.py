"""Head norm, rotation and cache write in one pass over the fused projection."""

import torch
import triton
import triton.language as tl

from engine.kernels.interface import AttentionSpec, HeadNorm, Rotary
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.paged import scales_of, strides_of
from engine.kernels.triton.quantise import highest_of, scale_of, stored_as
from engine.kernels.triton.tiles import power_of_two
from engine.kernels.triton.write import scale_place, store_rows
from kv_cache.slab import KvSlab

PART_ELEMENTS = 2048  # of the heads that one program turns


@triton.jit
def turn_heads(
    src_ptr: tl.tensor,  # [heads, HEAD_DIM]
    dst_ptr: tl.tensor,
    first: tl.tensor,  # the first of HEADS_BLOCK heads to turn
    limit: tl.tensor,  # and one behind the last; 0 turns none
    dst_stride: tl.tensor,  # between heads
    cos_ptr: tl.tensor,  # this token's row, [HALF]
    sin_ptr: tl.tensor,
    weight_ptr: tl.tensor,  # None: no norm
    scales_ptr: tl.tensor,  # head 0's scale of the row; None: there are none
    HEADS_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Element i turns with element i + HALF; those from 2 * HALF on are only normed."""
    heads = first + tl.arange(0, HEADS_BLOCK)[:, None]
    cols = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (heads < limit) & (cols < HALF)
    rest_cols = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    rest_inside = (heads < limit) & (rest_cols < HEAD_DIM)
    src = src_ptr + heads * HEAD_DIM
    low = tl.load(src + cols, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(src + HALF + cols, mask=inside, other=0.0).to(tl.float32)
    rest = tl.load(src + rest_cols, mask=rest_inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(low * low + high * high, 1) + tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + EPS)[:, None]
        low *= factor * tl.load(weight_ptr + cols, mask=cols < HALF, other=0.0)
        high *= factor * tl.load(weight_ptr + HALF + cols, mask=cols < HALF, other=0.0)
        rest *= factor * tl.load(weight_ptr + rest_cols, mask=rest_cols < HEAD_DIM, other=0.0)
    cos = tl.load(cos_ptr + cols, mask=cols < HALF, other=0.0)
    sin = tl.load(sin_ptr + cols, mask=cols < HALF, other=0.0)
    dst = dst_ptr + heads * dst_stride
    kind = dst_ptr.dtype.element_ty
    first_half = low * cos - high * sin
    second_half = high * cos + low * sin
    if scales_ptr is not None:
        highest = tl.maximum(highest_of(first_half), highest_of(second_half))
        if 2 * HALF < HEAD_DIM:
            highest = tl.maximum(highest, highest_of(rest))
        scale = scale_of(highest, LARGEST)
        tl.store(scales_ptr + heads * (dst_stride // 4), scale[:, None], mask=heads < limit)
        first_half = stored_as(first_half, scale, LARGEST, kind)
        second_half = stored_as(second_half, scale, LARGEST, kind)
        rest = stored_as(rest, scale, LARGEST, kind)
    tl.store(dst + cols, first_half.to(kind), mask=inside)
    tl.store(dst + HALF + cols, second_half.to(kind), mask=inside)
    if 2 * HALF < HEAD_DIM:
        tl.store(dst + rest_cols, rest.to(kind), mask=rest_inside)


@triton.jit
def rotate_kernel(
    qkv_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    slab_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # the slab as fp32; None: its format has no scales
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    k_offset: tl.tensor,
    v_offset: tl.tensor,
    scales_offset: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    EPS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr,  # query heads of a program
    KV_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Program (token, part): parts of the query heads, then the token's keys, then its values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = qkv_ptr + token * ((NUM_HEADS + KV_HEADS) * HEAD_DIM + KV_HEADS * VALUE_DIM)
    turn = tl.load(positions_ptr + token) * HALF
    slot = tl.load(slots_ptr + token)
    base = slab_ptr + slot // BLOCK_SIZE * block_stride
    if part * Q_BLOCK < NUM_HEADS:
        turn_heads(
            row, q_out_ptr + token * NUM_HEADS * HEAD_DIM, part * Q_BLOCK, NUM_HEADS,
            HEAD_DIM, cos_ptr + turn, sin_ptr + turn, q_weight_ptr, None,
            Q_BLOCK, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, EPS, LARGEST,
        )  # fmt: skip
    else:
        first = (part - tl.cdiv(NUM_HEADS, Q_BLOCK)) * KV_BLOCK
        limit = tl.where(slot < 0, 0, KV_HEADS)
        k_scales = scales_ptr
        v_scales = scales_ptr
        if scales_ptr is not None:
            k_scales = scale_place(scales_ptr, slot, block_stride, scales_offset, BLOCK_SIZE)
            v_scales = k_scales + BLOCK_SIZE
        k_row = row + NUM_HEADS * HEAD_DIM
        turn_heads(
            k_row, base + k_offset + slot % BLOCK_SIZE * HEAD_DIM, first, limit,
            head_stride, cos_ptr + turn, sin_ptr + turn, k_weight_ptr, k_scales,
            KV_BLOCK, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, EPS, LARGEST,
        )  # fmt: skip
        store_rows(
            k_row + KV_HEADS * HEAD_DIM, base + v_offset + slot % BLOCK_SIZE * VALUE_DIM,
            first, limit, head_stride, v_scales, KV_BLOCK, VALUE_DIM, VALUE_BLOCK, LARGEST,
        )  # fmt: skip


def rotate_launch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotary: Rotary,
    norm: HeadNorm | None,
    spec: AttentionSpec,
    slab: KvSlab,
    layer: int,
    slots: torch.Tensor,
    q_out: torch.Tensor,
) -> Launch:
    half = rotary.cos.shape[1]
    heads_that_fit = max(PART_ELEMENTS // power_of_two(spec.head_dim), 1)
    q_block = min(power_of_two(spec.num_heads), heads_that_fit)
    kv_block = min(power_of_two(spec.num_kv_heads), heads_that_fit)
    q_weight, k_weight, eps = (
        (None, None, 0.0)
        if norm is None
        else (
            norm.q_weight,
            norm.k_weight,
            norm.eps,
        )
    )
    return Launch(
        rotate_kernel,
        (qkv.shape[0], -(-spec.num_heads // q_block) - (-spec.num_kv_heads // kv_block)),
        (
            qkv,
            q_out,
            positions,
            slots,
            rotary.cos,
            rotary.sin,
            q_weight,
            k_weight,
            slab.data,
            scales_of(slab),
            *strides_of(slab, layer),
        ),  # fmt: skip
        {
            "NUM_HEADS": spec.num_heads,
            "KV_HEADS": spec.num_kv_heads,
            "HEAD_DIM": spec.head_dim,
            "VALUE_DIM": spec.value_dim,
            "BLOCK_SIZE": slab.layout.block_size,
            "EPS": eps,
            "HALF": half,
            "HALF_BLOCK": power_of_two(half),
            "REST_BLOCK": power_of_two(max(spec.head_dim - 2 * half, 1)),
            "VALUE_BLOCK": power_of_two(spec.value_dim),
            "Q_BLOCK": q_block,
            "KV_BLOCK": kv_block,
            "LARGEST": slab.layout.format.largest,
        },
    )
