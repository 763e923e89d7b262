"""From the projection's output to turned queries and cached keys and values, in one pass."""

from typing import Any

from engine.kernels.cpu.emit import LANES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.memory import (
    cached_bytes,
    claim,
    copy,
    element_bytes,
    int64_at,
    is_quantised,
    load,
    load_fp32,
    real,
    store,
    store_fp32,
    thread_number,
    word,
)
from engine.kernels.cpu.norms import norm_scale
from engine.kernels.cpu.paged import SCALE_BYTES
from engine.kernels.cpu.quantised import quantise

WORDS = "24qd"


def rotate_and_write(job: Any) -> None:
    """Pieces are tokens; a negative slot means that the keys and values are cached already."""
    qkv, q = word(job, 0), word(job, 1)
    positions, cos, sin, half = word(job, 2), word(job, 3), word(job, 4), word(job, 5)
    q_weight, k_weight = word(job, 6), word(job, 7)  # fp32, or 0 for no norm
    heads, kv_heads, dim, value_dim = word(job, 8), word(job, 9), word(job, 10), word(job, 11)
    slots, tokens, together = word(job, 12), word(job, 13), word(job, 14)
    row = scratch_row(job)
    eps = real(job, 24)
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
                rotate(job, source, target, cos + turn, sin + turn, half, dim, q_weight, eps, False)
                source += head_bytes
            slot = int64_at(slots + token * 8)
            if slot < 0:
                continue
            for head in range(kv_heads):
                place = key_row(job, slot, head, dim)
                target = row if is_quantised(job) else place
                turned = is_quantised(job)
                rotate(
                    job, source, target, cos + turn, sin + turn, half, dim, k_weight, eps, turned
                )
                if is_quantised(job):
                    quantise(job, row, dim, place, scale_place(job, slot, head, 0))
                source += head_bytes
            for head in range(kv_heads):
                put_value(job, slot, head, value_dim, source, row)
                source += value_bytes


def write_kv(job: Any) -> None:
    """Keys and values as they are to their slots; the words are those of `rotate_and_write`,
    with the keys in place of qkv and the values in place of q."""
    k, v = word(job, 0), word(job, 1)
    kv_heads, dim, value_dim = word(job, 9), word(job, 10), word(job, 11)
    slots, tokens, together = word(job, 12), word(job, 13), word(job, 14)
    head_bytes, value_bytes = dim * element_bytes(job), value_dim * element_bytes(job)
    row = scratch_row(job)
    while True:
        first = claim(job, together)
        if first >= tokens:
            return
        for token in range(first, min(first + together, tokens)):
            slot = int64_at(slots + token * 8)
            if slot < 0:
                continue
            for head in range(kv_heads):
                source = token * kv_heads + head
                put_key(job, slot, head, dim, k + source * head_bytes, row)
                put_value(job, slot, head, value_dim, v + source * value_bytes, row)


@part_of_kernel
def scratch_row(job: Any) -> Any:
    """A row of fp32 of this thread's, where the cache is quantised."""
    return word(job, 22) + thread_number(job) * word(job, 23) if is_quantised(job) else 0


@part_of_kernel
def put_key(job: Any, slot: Any, head: Any, dim: Any, source: Any, row: Any) -> None:
    put(job, source, dim, key_row(job, slot, head, dim), scale_place(job, slot, head, 0), row)


@part_of_kernel
def put_value(job: Any, slot: Any, head: Any, dim: Any, source: Any, row: Any) -> None:
    put(job, source, dim, value_row(job, slot, head, dim), scale_place(job, slot, head, 1), row)


@part_of_kernel
def put(job: Any, source: Any, dim: Any, target: Any, scale: Any, row: Any) -> None:
    """A row as it is, or quantised by way of the scratch row."""
    if not is_quantised(job):
        copy(target, source, dim * element_bytes(job))
        return
    for i in range(0, dim, LANES):
        store_fp32(row + i * 4, load(job, source + i * element_bytes(job), dim - i), dim - i)
    quantise(job, row, dim, target, scale)


@part_of_kernel
def key_row(job: Any, slot: Any, head: Any, dim: Any) -> Any:
    return row_of(job, word(job, 15), slot, head, dim * cached_bytes(job))


@part_of_kernel
def value_row(job: Any, slot: Any, head: Any, dim: Any) -> Any:
    return row_of(job, word(job, 16), slot, head, dim * cached_bytes(job))


@part_of_kernel
def scale_place(job: Any, slot: Any, head: Any, plane: Any) -> Any:
    behind = plane * SCALE_BYTES << word(job, 19)
    return row_of(job, word(job, 21), slot, head, SCALE_BYTES) + behind


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
    wide: Any,
) -> None:
    """One head: norm if there is a weight, rotation of 2 * half elements, the rest as it is. The
    result is in elements, or `wide`, which is fp32."""
    scale = norm_scale(job, source, dim, eps) if weight != 0 else 1.0
    for i in range(0, half, LANES):
        count = half - i
        c, s = load_fp32(cos + i * 4, count), load_fp32(sin + i * 4, count)
        a = normed(job, source, i, count, weight, scale)
        b = normed(job, source, half + i, count, weight, scale)
        put_part(job, target, i, a * c - b * s, count, wide)
        put_part(job, target, half + i, b * c + a * s, count, wide)
    for i in range(2 * half, dim, LANES):
        rest = normed(job, source, i, dim - i, weight, scale)
        put_part(job, target, i, rest, dim - i, wide)


@part_of_kernel
def put_part(job: Any, target: Any, i: Any, value: Any, count: Any, wide: Any) -> None:
    if wide:
        store_fp32(target + i * 4, value, count)
    else:
        store(job, target + i * element_bytes(job), value, count)


@part_of_kernel
def normed(job: Any, source: Any, i: Any, count: Any, weight: Any, scale: Any) -> Any:
    value = load(job, source + i * element_bytes(job), count)
    if weight != 0:
        value = value * scale * load_fp32(weight + i * 4, count)
    return value
