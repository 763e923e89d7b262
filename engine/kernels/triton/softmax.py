"""Scores in powers of two and the running softmax, shared by decode and prefill attention."""

from math import e, log2

import triton
import triton.language as tl

from engine.kernels.interface import AttentionSpec
from engine.kernels.triton.paged import load_rows, load_scales, tile_blocks, tile_rows
from engine.kernels.triton.tiles import AttentionTiles, padded
from kv_cache.slab import KvSlab


def attention_constants(
    spec: AttentionSpec, slab: KvSlab, tiles: AttentionTiles
) -> dict[str, object]:
    """The constexprs that both attention kernels take.

    The weight of a key is 2 ** (SCALE * qk), or 2 ** (SCALE * tanh(INNER * qk)) if INNER is not 0.
    """
    inner = 0.0 if spec.soft_cap is None else spec.scale / spec.soft_cap
    outer = spec.scale if spec.soft_cap is None else spec.soft_cap
    return {
        "NUM_HEADS": spec.num_heads,
        "KV_HEADS": spec.num_kv_heads,
        "HEAD_DIM": spec.head_dim,
        "VALUE_DIM": spec.value_dim,
        "HEAD_BLOCK": padded(spec.head_dim),
        "VALUE_BLOCK": padded(spec.value_dim),
        "BLOCK_SIZE": slab.layout.block_size,
        "WINDOW": spec.window or 0,
        "SCALE": outer * log2(e),
        "INNER": inner,
        "PRECISION": "ieee",
        "ROWS": tiles.rows,
        "TOKENS": tiles.tokens,
    }


@triton.jit
def beginning(
    sinks_ptr: tl.tensor,  # None: there are none
    heads: tl.tensor,  # [ROWS]
    sunk: tl.tensor,  # [ROWS], whether a row begins at its head's sink
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Maximum and total of each row before any key. A sink weighs 1 beside itself."""
    highest = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=sunk, other=0.0) * 1.4426950408889634
        highest = tl.where(sunk, sinks, highest)
        total = tl.where(sunk, 1.0, total)
    return highest, total


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """By exp2, since libdevice's needs a library to link. Absolute error 1e-7."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0)


@triton.jit
def attended(
    q: tl.tensor,  # [ROWS, HEAD_BLOCK]
    positions: tl.tensor,  # [ROWS], of the queries in their sequence
    highest: tl.tensor,  # [ROWS], the running maximum; starts finite, so that no row turns NaN
    total: tl.tensor,  # [ROWS], the running sum
    acc: tl.tensor,  # [ROWS, VALUE_BLOCK]
    k_ptr: tl.tensor,  # the slab, moved on to the layer's keys of the KV head
    v_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # moved on to the scales of those keys; None: there are none
    table_ptr: tl.tensor,  # the sequence's block table
    begin: tl.tensor,
    end: tl.tensor,
    kv_len: tl.tensor,
    block_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SCALE: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,  # false: every query sees every token of these tiles
) -> tl.tensor:
    """Folds tiles begin .. end of the sequence's tokens into the running softmax.

    A scale belongs to a token's row: of a key it multiplies the score, of a value the weight, so
    that elements are only converted. Weights times scales may be too small for fp16.
    """
    WEIGHT: tl.constexpr = (
        tl.bfloat16 if scales_ptr is not None and q.dtype == tl.float16 else q.dtype
    )
    blocks = tile_blocks(table_ptr, begin * TOKENS, kv_len, BLOCK_SIZE, TOKENS)
    for tile in range(begin, end):
        first = tile * TOKENS
        tokens = first + tl.arange(0, TOKENS)
        k_rows = tile_rows(k_ptr, blocks, first, block_stride, HEAD_DIM, BLOCK_SIZE, TOKENS)
        v_rows = tile_rows(v_ptr, blocks, first, block_stride, VALUE_DIM, BLOCK_SIZE, TOKENS)
        if scales_ptr is not None:
            k_scales = tile_rows(
                scales_ptr, blocks, first, block_stride // 4, 1, BLOCK_SIZE, TOKENS
            )
            v_scale = load_scales(k_scales + BLOCK_SIZE, tokens < kv_len, MASKED)
            k_scale = load_scales(k_scales, tokens < kv_len, MASKED)
        # Known an iteration ahead, a block does not delay the loads that its address leads to.
        blocks = tile_blocks(table_ptr, first + TOKENS, kv_len, BLOCK_SIZE, TOKENS)
        k = load_rows(k_rows, tokens < kv_len, HEAD_DIM, HEAD_BLOCK, MASKED).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if scales_ptr is not None:
            scores = scores * k_scale[None, :]
        if INNER > 0.0:
            scores = tanh(scores * INNER)
        if MASKED:
            visible = tokens[None, :] <= positions[:, None]
            if WINDOW > 0:
                visible = visible & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * SCALE)
        weights = tl.exp2(scores * SCALE - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if scales_ptr is not None:
            weights = weights * v_scale[None, :]
        v = load_rows(v_rows, tokens < kv_len, VALUE_DIM, VALUE_BLOCK, MASKED).to(WEIGHT)
        acc = tl.dot(weights.to(WEIGHT), v, acc, input_precision=PRECISION)
        highest = higher
    return highest, total, acc
