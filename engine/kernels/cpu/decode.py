"""Attention of one query token for each sequence over its cached tokens.

A piece of work is one KV head of one sequence, over at most SPLIT tokens counted from the
sequence's start; the thread that finishes a sequence's head last merges its pieces. So one long
sequence and many short ones both keep all threads busy, and what a sequence gets does not
depend on its neighbours, to the last bit.

Within a piece, tokens go by in tiles of 64, and while a tile is computed the next one's rows
are fetched, beyond the end of the piece too.
"""

from functools import cache
from typing import Any, NamedTuple

from engine.kernels.cpu.paged import (
    ADDRESS_BYTES,
    ARRIVALS,
    END_SEQUENCE,
    FIRST_SEQUENCE,
    GROUP,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LIST_BYTES,
    LOWEST,
    MASKED,
    OUT,
    PARTIALS,
    QUERIES,
    SCRATCH,
    SCRATCH_STRIDE,
    TILE,
    VALUE_DIM,
    WINDOW,
    edge_bytes,
    hide_unseen,
    kv_len,
    list_groups,
    query_start,
    scaled_score,
)
from engine.kernels.cpu.rows import score_rows, straighten, weigh_1, weigh_2, weigh_4
from engine.kernels.cpu.simd import (
    LANES,
    atomic_add,
    claim,
    copy,
    element_bytes,
    float_at,
    fma,
    has_dot,
    int64_at,
    kept,
    largest,
    load_fp32,
    maximum,
    part_of_kernel,
    power_of_two,
    prefetch,
    put_float,
    put_int64,
    splat,
    store,
    store_fp32,
    thread_number,
    total,
    weight_of,
    word,
    zero,
)

SPLIT = 256  # tokens
TILE_BYTES = TILE * 4  # of one query's scores
VECTOR_BYTES = LINE_BYTES = 64
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


@part_of_kernel
def row_floats(value_dim: int) -> Any:
    """fp32 sums of one query, padded to what `weigh` writes."""
    return (value_dim + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)


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
    return Areas(lists, edges, maxima, totals, scores, weights, weights + queries * TILE_BYTES)


@cache
def scratch_bytes(queries: int, value_dim: int, element_size: int) -> Any:
    """Of one thread, as `areas_of` divides it."""
    state = 2 * VECTOR_BYTES + 2 * TILE_BYTES + row_floats(value_dim) * 4
    return 2 * LIST_BYTES + edge_bytes(value_dim, element_size) + padded(queries) * state


@part_of_kernel
def partial_bytes(queries: int, value_dim: int) -> Any:
    return queries * (HEADER + row_floats(value_dim)) * 4


def decode(job: Any) -> None:
    areas = areas_of(job, thread_number(job))
    current, following = areas.lists, areas.lists + LIST_BYTES
    piece = find(job, claim(job, 1), word(job, FIRST_SEQUENCE), 0)
    start = piece.first // GROUP * GROUP
    groups = list_groups(job, piece.sequence, piece.head, start, piece.end, current)
    while groups > 0:
        begin(job, areas)
        upcoming = piece
        while start < piece.end:
            start += TILE
            if start < piece.end:
                next_groups = list_groups(
                    job, piece.sequence, piece.head, start, piece.end, following
                )
            else:
                upcoming = find(job, claim(job, 1), piece.sequence, piece.base)
                next_start = upcoming.first // GROUP * GROUP
                next_groups = list_groups(
                    job, upcoming.sequence, upcoming.head, next_start, upcoming.end, following
                )
            ahead = following if next_groups > 0 else current
            score(job, areas, piece, current, groups, ahead)
            soften(job, areas, piece, start - TILE, groups)
            weigh(job, areas, piece, start - TILE, groups, current, ahead)
            current, following = following, current
            groups = next_groups
        finish(job, areas, piece)
        piece = upcoming
        start = piece.first // GROUP * GROUP


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


@part_of_kernel
def begin(job: Any, areas: Any) -> None:
    queries = padded(word(job, HEADS) // word(job, KV_HEADS))
    for i in range(queries):
        put_float(areas.maxima + i * VECTOR_BYTES, LOWEST)
    end = areas.sums + queries * row_floats(word(job, VALUE_DIM)) * 4
    zero(areas.totals, end - areas.totals)


@part_of_kernel
def score(job: Any, areas: Any, piece: Any, current: Any, groups: Any, ahead: Any) -> None:
    """The scores of a tile, and meanwhile the next tile's keys on their way."""
    heads, dim = word(job, HEADS), word(job, HEAD_DIM)
    queries = heads // word(job, KV_HEADS)
    row_bytes = dim * element_bytes(job)
    token = query_start(job, piece.sequence)
    query = word(job, QUERIES) + (token * heads + piece.head * queries) * row_bytes
    share = (2 * GROUP * row_bytes // LINE_BYTES + queries - 1) // queries
    for group in range(0, groups, 2):
        at = group * ADDRESS_BYTES
        for i in range(queries):
            fetch(ahead + at, i * share, share, GROUP * row_bytes // LINE_BYTES)
            scores = areas.scores + i * TILE_BYTES + group * GROUP * 4
            score_rows(job, query + i * row_bytes, current + at, dim, scores)


@part_of_kernel
def fetch(place: Any, line: Any, count: Any, half: Any) -> None:
    """Asks for `count` lines of two listed groups, the first one having `half` of them.

    Lines must be asked for evenly over the work: while 32 at once were on their way all loads
    waited behind them, and a thread got 8 GB/s out of scattered blocks, instead of 17.
    """
    end = min(line + count, 2 * half)
    first, second = int64_at(place), int64_at(place + ADDRESS_BYTES) - half * LINE_BYTES
    for i in range(line, min(end, half)):
        prefetch(first + i * LINE_BYTES)
    for i in range(max(line, half), end):
        prefetch(second + i * LINE_BYTES)


@part_of_kernel
def soften(job: Any, areas: Any, piece: Any, start: Any, groups: Any) -> None:
    """Scores to weights relative to the maximum so far; older sums follow a new maximum."""
    tokens = groups * GROUP
    for i in range(word(job, HEADS) // word(job, KV_HEADS)):
        scores = areas.scores + i * TILE_BYTES
        highest = splat(MASKED)
        for at in range(0, tokens, LANES):
            value = scaled_score(job, load_fp32(scores + at * 4, LANES))
            value = kept(value, start + at, piece.first, piece.end, MASKED)
            store_fp32(scores + at * 4, value, LANES)
            highest = maximum(highest, value)
        place = areas.maxima + i * VECTOR_BYTES
        before = float_at(place)
        peak = max(before, largest(highest))
        totals = areas.totals + i * VECTOR_BYTES
        if peak > before:
            put_float(place, peak)
            shrink(job, areas, i, power_of_two(splat(before - peak)))
        weights = areas.weights + i * TILE_BYTES
        added = load_fp32(totals, LANES)
        for at in range(0, tokens, LANES):
            weight = weight_of(job, load_fp32(scores + at * 4, LANES) - peak)
            added = added + weight
            if has_dot(job):
                store(job, weights + at * element_bytes(job), weight, LANES)
            else:
                store_fp32(weights + at * 4, weight, LANES)
        store_fp32(totals, added, LANES)


@part_of_kernel
def shrink(job: Any, areas: Any, i: Any, factor: Any) -> None:
    place = areas.totals + i * VECTOR_BYTES
    store_fp32(place, load_fp32(place, LANES) * factor, LANES)
    row = row_floats(word(job, VALUE_DIM)) * 4
    for at in range(areas.sums + i * row, areas.sums + (i + 1) * row, VECTOR_BYTES):
        store_fp32(at, load_fp32(at, LANES) * factor, LANES)


@part_of_kernel
def weigh(
    job: Any, areas: Any, piece: Any, start: Any, groups: Any, current: Any, ahead: Any
) -> None:
    """Adds the tile's weighted values, and meanwhile the next tile's values are on their way."""
    values, later = current + LIST_BYTES // 2, ahead + LIST_BYTES // 2
    hide_unseen(job, areas.edges, start, piece.first, piece.end, groups, values)
    dim = word(job, VALUE_DIM)
    row = row_floats(dim) * 4
    queries = word(job, HEADS) // word(job, KV_HEADS)
    i = 0
    while i < queries:
        weights, sums = areas.weights + i * TILE_BYTES, areas.sums + i * row
        if queries - i >= 3:
            weigh_4(job, weights, TILE_BYTES, values, groups, dim, sums, row, later)
            i += 4
        elif queries - i == 2:
            weigh_2(job, weights, TILE_BYTES, values, groups, dim, sums, row, later)
            i += 2
        else:
            weigh_1(job, weights, TILE_BYTES, values, groups, dim, sums, row, later)
            i += 1


@part_of_kernel
def finish(job: Any, areas: Any, piece: Any) -> None:
    queries, dim = word(job, HEADS) // word(job, KV_HEADS), word(job, VALUE_DIM)
    partial = word(job, PARTIALS) + piece.number * partial_bytes(queries, dim)
    row = row_floats(dim) * 4
    for i in range(queries):
        sums = areas.sums + i * row
        straighten(job, sums, dim)
        added = total(load_fp32(areas.totals + i * VECTOR_BYTES, LANES))
        if piece.splits == 1:
            put_out(job, piece, i, sums, 1.0 / added)
        else:
            target = partial + i * (HEADER * 4 + row)
            put_float(target, float_at(areas.maxima + i * VECTOR_BYTES))
            put_float(target + 4, added)
            copy(target + HEADER * 4, sums, row)
    if piece.splits > 1:
        sequence = piece.sequence - word(job, FIRST_SEQUENCE)
        arrivals = word(job, ARRIVALS) + (sequence * word(job, KV_HEADS) + piece.head) * 8
        if atomic_add(arrivals, 1) == piece.splits - 1:
            put_int64(arrivals, 0)
            merge(job, areas, piece)


@part_of_kernel
def merge(job: Any, areas: Any, piece: Any) -> None:
    """The sequence's head from its partial results, in the order of its tokens."""
    queries, dim = word(job, HEADS) // word(job, KV_HEADS), word(job, VALUE_DIM)
    size, row = partial_bytes(queries, dim), row_floats(dim) * 4
    step = word(job, KV_HEADS) * size
    for i in range(queries):
        first = word(job, PARTIALS) + (piece.base + piece.head) * size + i * (HEADER * 4 + row)
        peak = float_at(first)
        for split in range(1, piece.splits):
            peak = max(peak, float_at(first + split * step))
        sums = areas.sums
        zero(sums, row)
        added = splat(0.0)
        for split in range(piece.splits):
            partial = first + split * step
            factor = power_of_two(splat(float_at(partial) - peak))
            added = fma(factor, splat(float_at(partial + 4)), added)
            for at in range(0, row, VECTOR_BYTES):
                value = load_fp32(partial + HEADER * 4 + at, LANES)
                store_fp32(sums + at, fma(factor, value, load_fp32(sums + at, LANES)), LANES)
        put_out(job, piece, i, sums, 1.0 / largest(added))


@part_of_kernel
def put_out(job: Any, piece: Any, i: Any, sums: Any, factor: Any) -> None:
    heads, dim = word(job, HEADS), word(job, VALUE_DIM)
    head = piece.head * (heads // word(job, KV_HEADS)) + i
    row = (query_start(job, piece.sequence) * heads + head) * dim * element_bytes(job)
    for at in range(0, dim, LANES):
        value = load_fp32(sums + at * 4, LANES) * factor
        store(job, word(job, OUT) + row + at * element_bytes(job), value, dim - at)
