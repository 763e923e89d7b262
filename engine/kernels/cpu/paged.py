"""What both kinds of attention share: the words of their jobs, and how to find a token's rows."""

from typing import Any

from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.memory import (
    cached_bytes,
    copy,
    float_at,
    int32_at,
    int64_at,
    is_quantised,
    prefetch,
    put_float,
    put_int64,
    real,
    word,
    zero,
)
from engine.kernels.cpu.vectors import LOG2_E, power_of_two, splat

GROUP = 8  # tokens: the smallest block, so a group's rows are one run of memory
TILE = 64  # tokens that are looked at together
ADDRESS_BYTES = 8
# A list has the addresses of a tile's groups of keys, then of values, then of the keys' scales.
VALUES_LIST = TILE // GROUP * ADDRESS_BYTES
SCALES_LIST = 2 * VALUES_LIST
LIST_BYTES = 3 * VALUES_LIST
MASKED = -1e30
LOWEST = -1e20  # where maxima begin: above what is masked, so that it counts for nothing
SCALE_BYTES = 4  # of a row in a quantised cache

WORDS = "25q2d"
(
    QUERIES,  # [tokens, heads, head_dim]
    OUT,  # [tokens, heads, value_dim]
    OUT_ROW,  # from token to token, in bytes, as all strides here
    KEYS,  # of block 0, head 0 in the layer
    VALUES,
    SCALES,  # of those keys, fp32; the values' lie behind a block of them
    BLOCK_STRIDE,
    HEAD_STRIDE,
    BLOCK_SHIFT,  # block_size = 1 << BLOCK_SHIFT
    TABLES,  # int32
    TABLE_STRIDE,
    KV_LENS,  # int32
    QUERY_STARTS,  # int32
    FIRST_SEQUENCE,
    END_SEQUENCE,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    VALUE_DIM,
    WINDOW,  # tokens a query sees, itself included; at least every kv_len where there is none
    SCRATCH,  # of the first thread
    SCRATCH_STRIDE,
    PARTIALS,
    ARRIVALS,
    SINKS,  # fp32, [heads]; 0 for none
    SCALE,  # of scores, 1 / soft_cap included where there is one
    SOFT_CAP,  # 0 for none
) = range(27)


@part_of_kernel
def begin_row(job: Any, maximum: Any, total: Any, head: Any) -> None:
    """Where a row's maximum and total begin: at its head's sink, which weighs 1 beside itself."""
    put_float(maximum, LOWEST)
    put_float(total, 0.0)
    if word(job, SINKS) != 0:
        put_float(maximum, float_at(word(job, SINKS) + head * 4) * LOG2_E)
        put_float(total, 1.0)


@part_of_kernel
def key_row(job: Any, sequence: Any, head: Any, token: Any) -> Any:
    row_bytes = word(job, HEAD_DIM) * cached_bytes(job)
    return block_row(job, sequence, head, token, row_bytes) + word(job, KEYS)


@part_of_kernel
def value_row(job: Any, sequence: Any, head: Any, token: Any) -> Any:
    row_bytes = word(job, VALUE_DIM) * cached_bytes(job)
    return block_row(job, sequence, head, token, row_bytes) + word(job, VALUES)


@part_of_kernel
def key_scale(job: Any, sequence: Any, head: Any, token: Any) -> Any:
    return block_row(job, sequence, head, token, SCALE_BYTES) + word(job, SCALES)


@part_of_kernel
def value_scales_behind(job: Any) -> Any:
    """How far the scale of a token's value lies behind that of its key."""
    return SCALE_BYTES << word(job, BLOCK_SHIFT)


@part_of_kernel
def block_row(job: Any, sequence: Any, head: Any, token: Any, row_bytes: Any) -> Any:
    """Offset from block 0 and head 0; every product is 64 bits wide."""
    shift = word(job, BLOCK_SHIFT)
    table = word(job, TABLES) + sequence * word(job, TABLE_STRIDE)
    block = int32_at(table + (token >> shift) * 4)
    inside = token & ((1 << shift) - 1)
    return block * word(job, BLOCK_STRIDE) + head * word(job, HEAD_STRIDE) + inside * row_bytes


@part_of_kernel
def kv_len(job: Any, sequence: Any) -> Any:
    return int32_at(word(job, KV_LENS) + sequence * 4)


@part_of_kernel
def query_start(job: Any, sequence: Any) -> Any:
    return int32_at(word(job, QUERY_STARTS) + sequence * 4)


@part_of_kernel
def list_groups(job: Any, sequence: Any, head: Any, start: Any, end: Any, addresses: Any) -> Any:
    """Lists the groups of the tile at `start`, the last one up to the end of the list; gives
    how many there are."""
    groups = (min(end - start, TILE) + GROUP - 1) // GROUP
    for i in range(TILE // GROUP if groups > 0 else 0):
        token = start + min(i, groups - 1) * GROUP
        place = addresses + i * ADDRESS_BYTES
        put_int64(place, key_row(job, sequence, head, token))
        put_int64(place + VALUES_LIST, value_row(job, sequence, head, token))
        if is_quantised(job):
            scales = key_scale(job, sequence, head, token)
            put_int64(place + SCALES_LIST, scales)
            prefetch(scales)
            prefetch(scales + value_scales_behind(job))
    return groups


@part_of_kernel
def hide_unseen(
    job: Any, edge: Any, start: Any, first: Any, end: Any, groups: Any, values: Any
) -> None:
    """Values outside first .. end may be anything, and 0 * NaN is NaN: groups that hold some,
    the first or the last one, are copied to `edge` with zeros in their place."""
    row_bytes = word(job, VALUE_DIM) * cached_bytes(job)
    for group in range(groups):
        token = start + group * GROUP
        if token >= first and token + GROUP <= end:
            continue
        place = values + group * ADDRESS_BYTES
        source = int64_at(place)
        put_int64(place, edge)
        for row in range(GROUP):
            if token + row >= first and token + row < end:
                copy(edge, source + row * row_bytes, row_bytes)
            else:
                zero(edge, row_bytes)
            edge += row_bytes


@part_of_kernel
def edge_bytes(value_dim: int, element_size: int) -> Any:
    """Room for the first and the last group."""
    return (2 * GROUP * value_dim * element_size + 63) // 64 * 64


@part_of_kernel
def scaled_score(job: Any, value: Any) -> Any:
    """Times log2(e), so that weights are powers of two; capped if there is a cap."""
    value = value * real(job, SCALE)
    cap = real(job, SOFT_CAP)
    if cap != 0.0:  # tanh(x) = 1 - 2 / (exp(2 * x) + 1), the exponent's factors in SCALE
        value = (splat(1.0) - splat(2.0) / (power_of_two(value) + 1.0)) * cap
    return value
