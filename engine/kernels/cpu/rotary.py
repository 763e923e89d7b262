"""From the projection's output to turned queries and cached keys and values, in one pass."""

from typing import Any

from engine.kernels.cpu.emit import LANES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.memory import (
    claim,
    copy,
    element_bytes,
    int64_at,
    load,
    load_fp32,
    real,
    store,
    word,
)
from engine.kernels.cpu.norms import norm_scale

WORDS = "21qd"


def rotate_and_write(job: Any) -> None:
    """Pieces are tokens; a negative slot means that the keys and values are cached already."""
    qkv, q = word(job, 0), word(job, 1)
    positions, cos, sin, half = word(job, 2), word(job, 3), word(job, 4), word(job, 5)
    q_weight, k_weight = word(job, 6), word(job, 7)  # fp32, or 0 for no norm
    heads, kv_heads, dim, value_dim = word(job, 8), word(job, 9), word(job, 10), word(job, 11)
    slots, tokens, together = word(job, 12), word(job, 13), word(job, 14)
    eps = real(job, 21)
    head_bytes, value_bytes = dim * element_bytes(job), value_dim * element_bytes(job)
    token_bytes = (heads + kv_heads) * head_bytes + kv_heads * value_bytes
    while True:
        first = claim(job, together)
        if first >= tokens:
            return
        for token in range(first, min(first + together, tokens)):
            turn = int64_at(positions + token * 8) * half * 4
            source = qkv + token * token_bytes
            for head in range(heads):
                target = q + (token * heads + head) * head_bytes
                rotate(job, source, target, cos + turn, sin + turn, half, dim, q_weight, eps)
                source += head_bytes
            slot = int64_at(slots + token * 8)
            if slot < 0:
                continue
            for head in range(kv_heads):
                target = key_row(job, slot, head, head_bytes)
                rotate(job, source, target, cos + turn, sin + turn, half, dim, k_weight, eps)
                source += head_bytes
            for head in range(kv_heads):
                copy(value_row(job, slot, head, value_bytes), source, value_bytes)
                source += value_bytes


def write_kv(job: Any) -> None:
    """Keys and values as they are to their slots; the words are those of `rotate_and_write`,
    with the keys in place of qkv and the values in place of q."""
    k, v = word(job, 0), word(job, 1)
    kv_heads, dim, value_dim = word(job, 9), word(job, 10), word(job, 11)
    slots, tokens, together = word(job, 12), word(job, 13), word(job, 14)
    head_bytes, value_bytes = dim * element_bytes(job), value_dim * element_bytes(job)
    while True:
        first = claim(job, together)
        if first >= tokens:
            return
        for token in range(first, min(first + together, tokens)):
            slot = int64_at(slots + token * 8)
            if slot < 0:
                continue
            for head in range(kv_heads):
                row = token * kv_heads + head
                copy(key_row(job, slot, head, head_bytes), k + row * head_bytes, head_bytes)
                place = value_row(job, slot, head, value_bytes)
                copy(place, v + row * value_bytes, value_bytes)


@part_of_kernel
def key_row(job: Any, slot: Any, head: Any, row_bytes: Any) -> Any:
    return row_of(job, word(job, 15), slot, head, row_bytes)


@part_of_kernel
def value_row(job: Any, slot: Any, head: Any, row_bytes: Any) -> Any:
    return row_of(job, word(job, 16), slot, head, row_bytes)


@part_of_kernel
def row_of(job: Any, plane: Any, slot: Any, head: Any, row_bytes: Any) -> Any:
    """Address of one token's row; `plane` is that of block 0 and head 0 in the layer."""
    block_stride, head_stride = word(job, 17), word(job, 18)
    shift, size = word(job, 19), word(job, 20)  # block_size = 1 << shift
    return plane + (slot >> shift) * block_stride + head * head_stride + (slot & size) * row_bytes


@part_of_kernel
def rotate(
    job: Any,
    source: Any,
    target: Any,
    cos: Any,
    sin: Any,
    half: Any,
    dim: Any,
    weight: Any,
    eps: Any,
) -> None:
    """One head: norm if there is a weight, rotation of 2 * half elements, the rest as it is."""
    size = element_bytes(job)
    scale = norm_scale(job, source, dim, eps) if weight != 0 else 1.0
    for i in range(0, half, LANES):
        count = half - i
        c, s = load_fp32(cos + i * 4, count), load_fp32(sin + i * 4, count)
        a = normed(job, source, i, count, weight, scale)
        b = normed(job, source, half + i, count, weight, scale)
        store(job, target + i * size, a * c - b * s, count)
        store(job, target + (half + i) * size, b * c + a * s, count)
    for i in range(2 * half, dim, LANES):
        rest = normed(job, source, i, dim - i, weight, scale)
        store(job, target + i * size, rest, dim - i)


@part_of_kernel
def normed(job: Any, source: Any, i: Any, count: Any, weight: Any, scale: Any) -> Any:
    value = load(job, source + i * element_bytes(job), count)
    if weight != 0:
        value = value * scale * load_fp32(weight + i * 4, count)
    return value
