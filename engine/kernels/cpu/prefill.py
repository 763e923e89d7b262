"""Attention of many query tokens of a sequence over its cached tokens, chunk or whole prompt.

A piece of work is 64 rows (a query token and one of the heads that share a KV head each) over
all the tokens they see, 64 at a time. Scores are computed transposed, a row of them for each
token: so keys are read from their blocks as they lie, the queries are what is packed, and the
maximum and the total over tokens are plain vector operations without shuffles.

Tiles of tokens begin at multiples of 64 of the sequence, and no row sees another one: a prompt
gives the same bits in whatever chunks it comes.
"""

from functools import cache
from typing import Any, NamedTuple

from engine.kernels.cpu.paged import (
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
    QUERIES,
    SCALE,
    SCRATCH,
    SCRATCH_STRIDE,
    SOFT_CAP,
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
from engine.kernels.cpu.rows import lay_rows, pair_up, transpose_rows
from engine.kernels.cpu.simd import (
    LANES,
    above,
    claim,
    element_bytes,
    float_at,
    fma,
    has_dot,
    int64_at,
    largest,
    load_fp32,
    maximum,
    part_of_kernel,
    power_of_two,
    put_float,
    put_int64,
    real,
    splat,
    store,
    store_fp32,
    thread_number,
    weight_of,
    where_between,
    word,
)
from engine.kernels.cpu.tile import tile_4x16, tile_4x64

ROWS = 64
ROW_BYTES = ROWS * 4  # one fp32 (or pair of bf16) for each row
LAZY = 8.0  # a maximum is only renewed when it grew by 2 ** LAZY: sums are rescaled that rarely


class Piece(NamedTuple):
    sequence: int
    base: int  # number of the sequence's first piece
    head: int
    row: int  # query token of the sequence times heads in the group, plus head in the group
    rows: int
    lowest: int  # positions of the first and the last query token
    highest: int


class Areas(NamedTuple):
    """Addresses in a thread's scratch."""

    rows: int  # the addresses of the queries
    lists: int
    edges: int
    positions: int  # fp32, of each row, as the two below
    maxima: int  # times log2(e)
    totals: int
    factors: int  # that a renewed maximum takes the sums times
    queries: int  # [steps][ROWS]
    scores: int  # [TILE][ROWS], and then the weights, in pairs with `bf16_dot`
    sums: int  # [ROWS][values]
    values: int  # [TILE or pairs][values]
    keys: int  # [TILE][keys] fp32, without `bf16_dot`


@part_of_kernel
def rounded(number: int, multiple: int) -> Any:
    return (number + multiple - 1) // multiple * multiple


@part_of_kernel
def areas_of(start: int, dim: int, value_dim: int, element_size: int) -> Any:
    """The scratch that begins at `start`; what is only needed for fp32 products is at its end."""
    lists = start + ROWS * 8
    edges = lists + LIST_BYTES
    positions = edges + edge_bytes(value_dim, element_size)
    queries = positions + 4 * ROW_BYTES
    scores = queries + rounded(dim, LANES) * ROW_BYTES
    sums = scores + TILE * ROW_BYTES
    values = sums + ROWS * sums_row(value_dim)
    keys = values + TILE * values_row(value_dim)
    return Areas(
        start,
        lists,
        edges,
        positions,
        positions + ROW_BYTES,
        positions + 2 * ROW_BYTES,
        positions + 3 * ROW_BYTES,
        queries,
        scores,
        sums,
        values,
        keys,
    )


@part_of_kernel
def sums_row(value_dim: int) -> Any:
    return rounded(value_dim, LANES) * 4


@part_of_kernel
def values_row(value_dim: int) -> Any:
    return rounded(value_dim, 2 * LANES) * 4


@part_of_kernel
def keys_row(dim: int) -> Any:
    return rounded(dim, LANES) * 4


@cache
def scratch_bytes(dim: int, value_dim: int, element_size: int) -> Any:
    keys: int = areas_of(0, dim, value_dim, element_size).keys
    return keys + TILE * keys_row(dim)


def prefill(job: Any) -> None:
    scratch = word(job, SCRATCH) + thread_number(job) * word(job, SCRATCH_STRIDE)
    areas = areas_of(scratch, word(job, HEAD_DIM), word(job, VALUE_DIM), element_bytes(job))
    piece = find(job, claim(job, 1), word(job, FIRST_SEQUENCE), 0)
    while piece.rows > 0:
        set_queries(job, areas, piece)
        first, end = max(0, piece.lowest - word(job, WINDOW) + 1), piece.highest + 1
        start = first // GROUP * GROUP
        fresh = True
        while start < end:
            stop = min(end, start // TILE * TILE + TILE)
            groups = list_groups(job, piece.sequence, piece.head, start, stop, areas.lists)
            values = areas.lists + LIST_BYTES // 2
            hide_unseen(job, areas.edges, start, first, end, groups, values)
            score(job, areas, groups)
            limit(job, areas, piece, start, groups * GROUP)
            soften(job, areas, groups * GROUP, fresh, piece.rows)
            weigh(job, areas, piece, groups, fresh)
            start, fresh = stop, False
        put_out(job, areas, piece)
        piece = find(job, claim(job, 1), piece.sequence, piece.base)


@part_of_kernel
def find(job: Any, number: Any, sequence: Any, base: Any) -> Any:
    """Piece `number`, at or after the sequence whose first piece is `base`; no rows if none.

    The last rows, which see the most tokens, come first, so that short pieces end the work.
    """
    kv_heads = word(job, KV_HEADS)
    group = word(job, HEADS) // kv_heads
    while sequence < word(job, END_SEQUENCE):
        queries = query_start(job, sequence + 1) - query_start(job, sequence)
        tiles = (queries * group + ROWS - 1) // ROWS
        if number < base + tiles * kv_heads:
            head, tile = (number - base) // tiles, tiles - 1 - (number - base) % tiles
            row, rows = tile * ROWS, min(ROWS, queries * group - tile * ROWS)
            origin = kv_len(job, sequence) - queries
            lowest, highest = origin + row // group, origin + (row + rows - 1) // group
            return Piece(sequence, base, head, row, rows, lowest, highest)
        base += tiles * kv_heads
        sequence += 1
    return Piece(sequence, base, 0, 0, 0, 0, 0)


@part_of_kernel
def set_queries(job: Any, areas: Any, piece: Any) -> None:
    """Packs the rows' queries and resets their state; rows beyond the last one see no token."""
    heads, dim = word(job, HEADS), word(job, HEAD_DIM)
    group = heads // word(job, KV_HEADS)
    token = query_start(job, piece.sequence)
    query, member = piece.row // group, piece.row % group
    position = piece.lowest
    for i in range(ROWS):
        at = (token + query) * heads + piece.head * group + member
        put_int64(areas.rows + i * 8, word(job, QUERIES) + at * dim * element_bytes(job))
        put_float(areas.positions + i * 4, position if i < piece.rows else -1)
        put_float(areas.maxima + i * 4, LOWEST)
        put_float(areas.totals + i * 4, 0.0)
        if i + 1 < piece.rows:
            member += 1
            if member == group:
                member, query, position = 0, query + 1, position + 1
    step_elements = 2 if has_dot(job) else 1
    for i in range(0, ROWS, LANES):
        for first in range(0, dim, LANES * step_elements):
            target = areas.queries + first // step_elements * ROW_BYTES + i * 4
            transpose_rows(job, areas.rows + i * 8, first, dim - first, target, ROW_BYTES)


@part_of_kernel
def score(job: Any, areas: Any, groups: Any) -> None:
    dim = word(job, HEAD_DIM)
    if has_dot(job):
        steps, row_bytes = dim // 2, dim * element_bytes(job)
    else:
        steps, row_bytes = dim, keys_row(dim)
        lay_rows(job, areas.lists, groups, dim, areas.keys, row_bytes)
    for four in range(0, groups * GROUP, 4):
        if has_dot(job):
            group = int64_at(areas.lists + four // GROUP * 8)
            keys = group + four % GROUP * row_bytes
        else:
            keys = areas.keys + four * row_bytes
        target = areas.scores + four * ROW_BYTES
        queries = areas.queries
        tile_4x64(job, keys, row_bytes, 4, queries, ROW_BYTES, steps, target, ROW_BYTES, False, 0)


@part_of_kernel
def limit(job: Any, areas: Any, piece: Any, start: Any, tokens: Any) -> None:
    """Caps the scores, and hides those of tokens that a row does not see."""
    if real(job, SOFT_CAP) != 0.0:
        for place in range(areas.scores, areas.scores + tokens * ROW_BYTES, 64):
            store_fp32(place, scaled_score(job, load_fp32(place, LANES)), LANES)
    window = word(job, WINDOW)
    crosses_window = start < piece.highest - window + 1
    first = 0 if crosses_window else max(0, piece.lowest + 1 - start)
    for t in range(first, tokens):
        for at in range(0, ROW_BYTES, 64):
            place = areas.scores + t * ROW_BYTES + at
            positions = load_fp32(areas.positions + at, LANES)
            value = load_fp32(place, LANES)
            value = where_between(value, start + t, positions, window, MASKED)
            store_fp32(place, value, LANES)


@part_of_kernel
def soften(job: Any, areas: Any, tokens: Any, fresh: Any, rows: Any) -> None:
    """Scores to weights relative to each row's maximum."""
    scale = 1.0 if real(job, SOFT_CAP) != 0.0 else real(job, SCALE)
    renewed = False
    put_highest(areas, tokens)
    for at in range(0, ROW_BYTES, 64):
        highest = load_fp32(areas.factors + at, LANES) * scale
        before = load_fp32(areas.maxima + at, LANES)
        peak = above(highest, before + LAZY, highest, before)
        factor = power_of_two(before - peak)
        renewed = renewed or largest(peak - before) > 0.0
        store_fp32(areas.maxima + at, peak, LANES)
        store_fp32(areas.factors + at, factor, LANES)
        added = load_fp32(areas.totals + at, LANES) * factor
        added = exponentiate(job, areas.scores + at, tokens, splat(scale), peak, added)
        store_fp32(areas.totals + at, added, LANES)
    if renewed and not fresh:
        shrink(job, areas, rows)


@part_of_kernel
def put_highest(areas: Any, tokens: Any) -> None:
    """Each row's highest score of the tile, where its factor will be; one loop for all rows,
    as one maximum after the other waits for the one before."""
    a = b = c = d = splat(MASKED)
    for row in range(areas.scores, areas.scores + tokens * ROW_BYTES, ROW_BYTES):
        a = maximum(a, load_fp32(row, LANES))
        b = maximum(b, load_fp32(row + 64, LANES))
        c = maximum(c, load_fp32(row + 128, LANES))
        d = maximum(d, load_fp32(row + 192, LANES))
    store_fp32(areas.factors, a, LANES)
    store_fp32(areas.factors + 64, b, LANES)
    store_fp32(areas.factors + 128, c, LANES)
    store_fp32(areas.factors + 192, d, LANES)


@part_of_kernel
def exponentiate(job: Any, scores: Any, tokens: Any, scale: Any, peak: Any, added: Any) -> Any:
    """Weights in place of the scores of 16 rows; `added` plus their total."""
    none = splat(0.0) - peak
    for t in range(0, tokens, 2):
        x = weight_of(job, fma(load_fp32(scores + t * ROW_BYTES, LANES), scale, none))
        y = weight_of(job, fma(load_fp32(scores + (t + 1) * ROW_BYTES, LANES), scale, none))
        added = added + x + y
        if has_dot(job):
            pair_up(scores + t // 2 * ROW_BYTES, x, y)
        else:
            store_fp32(scores + t * ROW_BYTES, x, LANES)
            store_fp32(scores + (t + 1) * ROW_BYTES, y, LANES)
    return added


@part_of_kernel
def shrink(job: Any, areas: Any, rows: Any) -> None:
    row = sums_row(word(job, VALUE_DIM))
    for i in range(rows):
        factor = float_at(areas.factors + i * 4)
        for at in range(areas.sums + i * row, areas.sums + (i + 1) * row, 64):
            store_fp32(at, load_fp32(at, LANES) * factor, LANES)


@part_of_kernel
def weigh(job: Any, areas: Any, piece: Any, groups: Any, fresh: Any) -> None:
    dim = word(job, VALUE_DIM)
    row, source_row = sums_row(dim), values_row(dim)
    values = areas.lists + LIST_BYTES // 2
    lay_rows(job, values, groups, dim, areas.values, source_row)
    steps = groups * GROUP // 2 if has_dot(job) else groups * GROUP
    for i in range(0, piece.rows, 4):
        weights, sums = areas.scores + i * 4, areas.sums + i * row
        at = 0
        while row - at >= 256:
            right = areas.values + at
            tile_4x64(
                job, weights, 4, ROW_BYTES, right, source_row, steps, sums + at, row, not fresh, 0
            )
            at += 256
        while at < row:
            right = areas.values + at
            tile_4x16(
                job, weights, 4, ROW_BYTES, right, source_row, steps, sums + at, row, not fresh, 0
            )
            at += 64


@part_of_kernel
def put_out(job: Any, areas: Any, piece: Any) -> None:
    heads, dim = word(job, HEADS), word(job, VALUE_DIM)
    group = heads // word(job, KV_HEADS)
    query, member = query_start(job, piece.sequence) + piece.row // group, piece.row % group
    for i in range(piece.rows):
        head = query * heads + piece.head * group + member
        target = word(job, OUT) + head * dim * element_bytes(job)
        member += 1
        if member == group:
            member, query = 0, query + 1
        factor = 1.0 / float_at(areas.totals + i * 4)
        sums = areas.sums + i * sums_row(dim)
        for at in range(0, dim, LANES):
            value = load_fp32(sums + at * 4, LANES) * factor
            store(job, target + at * element_bytes(job), value, dim - at)
