"""How decoding is cut into pieces, and what a thread keeps in its scratch memory."""

from functools import cache
from typing import Any, NamedTuple

from engine.kernels.cpu.emit import LANES, VECTOR_BYTES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.memory import (
    element_bytes,
    word,
)
from engine.kernels.cpu.paged import (
    END_SEQUENCE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LIST_BYTES,
    SCRATCH,
    SCRATCH_STRIDE,
    TILE,
    VALUE_DIM,
    WINDOW,
    edge_bytes,
    kv_len,
)
from engine.kernels.cpu.quantised import SCALES_BYTES, widened_bytes

SPLIT = 256  # tokens
TILE_BYTES = TILE * 4  # of one query's scores
HEADER = LANES  # floats before the sums of a partial result: its maximum, its total


class Piece(NamedTuple):
    number: int  # counted over all sequences
    sequence: int
    base: int  # number of the sequence's first piece
    splits: int  # of the sequence
    head: int
    first: int  # tokens first .. end
    end: int


class Areas(NamedTuple):
    """Addresses in a thread's scratch; each row is one query's."""

    lists: int
    edges: int  # two groups of values with zeros for those that no query sees
    maxima: int  # of scores, times log2(e)
    totals: int  # of weights, a vector of partial ones
    scores: int
    weights: int
    sums: int  # of weighted values
    scales: int  # of a quantised tile's keys and values
    widened: int  # its keys, and then its values
    queries: int  # widened, where registers are narrow


@part_of_kernel
def row_floats(dim: int) -> Any:
    """A row of fp32, padded to what `weigh` and `widen_query` write."""
    return (dim + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)


@part_of_kernel
def padded(queries: int) -> Any:
    """Three queries are weighed as four."""
    return (queries + 3) // 4 * 4


@part_of_kernel
def areas_of(job: Any, thread: Any) -> Any:
    queries = padded(word(job, HEADS) // word(job, KV_HEADS))
    lists = word(job, SCRATCH) + thread * word(job, SCRATCH_STRIDE)
    edges = lists + 2 * LIST_BYTES
    maxima = edges + edge_bytes(word(job, VALUE_DIM), element_bytes(job))
    totals = maxima + queries * VECTOR_BYTES
    scores = totals + queries * VECTOR_BYTES
    weights = scores + queries * TILE_BYTES
    sums = weights + queries * TILE_BYTES
    scales = sums + queries * row_floats(word(job, VALUE_DIM)) * 4
    widened = scales + SCALES_BYTES
    size = element_bytes(job)
    wide = widened + widened_bytes(word(job, HEAD_DIM), word(job, VALUE_DIM), size)
    return Areas(lists, edges, maxima, totals, scores, weights, sums, scales, widened, wide)


@cache
def scratch_bytes(queries: int, dim: int, value_dim: int, element_size: int) -> Any:
    """Of one thread, as `areas_of` divides it."""
    state = 2 * VECTOR_BYTES + 2 * TILE_BYTES + (row_floats(value_dim) + row_floats(dim)) * 4
    own = 2 * LIST_BYTES + edge_bytes(value_dim, element_size) + padded(queries) * state
    return own + SCALES_BYTES + widened_bytes(dim, value_dim, element_size)


@part_of_kernel
def partial_bytes(queries: int, value_dim: int) -> Any:
    return queries * (HEADER + row_floats(value_dim)) * 4


@part_of_kernel
def find(job: Any, number: Any, sequence: Any, base: Any) -> Any:
    """Piece `number`, at or after the sequence whose first piece is `base`; empty if none."""
    kv_heads = word(job, KV_HEADS)
    while sequence < word(job, END_SEQUENCE):
        length = kv_len(job, sequence)
        lowest = max(0, length - word(job, WINDOW))
        splits = (length + SPLIT - 1) // SPLIT - lowest // SPLIT
        if number < base + splits * kv_heads:
            split = lowest // SPLIT + (number - base) // kv_heads
            first, end = max(lowest, split * SPLIT), min(length, (split + 1) * SPLIT)
            head = (number - base) % kv_heads
            return Piece(number, sequence, base, splits, head, first, end)
        base += splits * kv_heads
        sequence += 1
    return Piece(number, sequence, base, 0, 0, 0, 0)
