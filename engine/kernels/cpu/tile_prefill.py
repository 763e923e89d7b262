"""Attention of many query tokens on a CPU with AMX.

A piece of work is 256 rows (a query token and one of the heads that share a KV head each) over all
the tokens they see, 64 at a time. A tile's keys are copied together and its values transposed once
for all of them. Then come strips of sixteen rows, which fill a register: scores, weights and sums
are computed transposed, a row of sixteen for each token and each element of a value. So maxima and
totals over tokens are plain vector operations, and weights are multiplied as they come.

Tiles of tokens begin at multiples of 64 of the sequence, and no row sees another one: a prompt
gives the same bits in whatever chunks it comes.
"""

from functools import cache
from typing import Any, NamedTuple

from engine.kernels.cpu.emit import LANES, LINE_BYTES, VECTOR_BYTES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.laying import lay_rows, pair_up, transpose_rows, turn
from engine.kernels.cpu.matrix import (
    TILE_BYTES,
    TILE_INPUTS,
    TILE_ROWS,
    four,
    release,
    set_shape,
    shape_memory,
    weigh_values,
)
from engine.kernels.cpu.memory import (
    claim,
    copy,
    float_at,
    int64_at,
    is_quantised,
    load_fp32,
    put_float,
    put_int64,
    real,
    store,
    store_fp32,
    thread_number,
    word,
    zero,
)
from engine.kernels.cpu.paged import (
    ADDRESS_BYTES,
    FIRST_SEQUENCE,
    GROUP,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LIST_BYTES,
    MASKED,
    OUT,
    OUT_ROW,
    QUERIES,
    SCALE,
    SCALE_BYTES,
    SCRATCH,
    SCRATCH_STRIDE,
    SOFT_CAP,
    TILE,
    VALUE_DIM,
    VALUES_LIST,
    WINDOW,
    begin_row,
    edge_bytes,
    hide_unseen,
    list_groups,
    query_start,
    scaled_score,
)
from engine.kernels.cpu.prefill_state import LAZY, find
from engine.kernels.cpu.quantised import SCALES_BYTES, gather_scales, widen, widened_bytes
from engine.kernels.cpu.vectors import (
    above,
    fma,
    largest,
    maximum,
    power_of_two,
    splat,
    weight_of,
    where_between,
)

ROWS = 256
STRIP = LANES  # rows that are computed side by side
ELEMENT_BYTES = 2
STATE_BYTES = ROWS * 4
SCORES_BYTES = TILE * VECTOR_BYTES  # of a strip
WEIGHTS_BYTES = TILE // 2 * VECTOR_BYTES
VALUES_STEP = (
    TILE // TILE_INPUTS * TILE_BYTES
)  # from sixteen elements of a tile's values to the next


class TileAreas(NamedTuple):
    """Addresses in a thread's scratch."""

    rows: int  # addresses of a strip's rows in the queries or the output
    lists: int
    edges: int
    positions: int  # fp32, of each row, as the two below
    maxima: int  # times log2(e)
    totals: int
    queries: int  # [strips][pairs][16]
    sums: int  # [strips][value dim][16] fp32
    scores: int  # [tokens][16] fp32 of a strip
    weights: int  # [pairs of tokens][16] of a strip
    keys: int  # [tokens][dim]
    pairs: int  # [pairs of tokens][value dim]
    values: int  # [value dim / 16][tokens / 32], each a tile
    scales: int  # of a quantised tile's keys and values
    widened: int  # its keys, and then its values


@part_of_kernel
def areas_of(start: int, dim: int, value_dim: int) -> Any:
    """The scratch that begins at `start`."""
    lists = start + STRIP * ADDRESS_BYTES
    edges = lists + LIST_BYTES
    positions = edges + edge_bytes(value_dim, ELEMENT_BYTES)
    queries = positions + 3 * STATE_BYTES
    sums = queries + ROWS * dim * ELEMENT_BYTES
    scores = sums + ROWS * value_dim * 4
    weights = scores + SCORES_BYTES
    keys = weights + WEIGHTS_BYTES
    pairs = keys + TILE * dim * ELEMENT_BYTES
    values = pairs + TILE * value_dim * ELEMENT_BYTES
    scales = values + TILE * value_dim * ELEMENT_BYTES
    return TileAreas(
        start,
        lists,
        edges,
        positions,
        positions + STATE_BYTES,
        positions + 2 * STATE_BYTES,
        queries,
        sums,
        scores,
        weights,
        keys,
        pairs,
        values,
        scales,
        scales + SCALES_BYTES,
    )


@cache
def scratch_bytes(dim: int, value_dim: int) -> int:
    widened: int = areas_of(0, dim, value_dim).widened
    return widened + int(widened_bytes(dim, value_dim, ELEMENT_BYTES))


def tile_prefill(job: Any) -> None:
    set_shape(job, shape_memory(), TILE_ROWS, TILE_ROWS)
    scratch = word(job, SCRATCH) + thread_number(job) * word(job, SCRATCH_STRIDE)
    areas = areas_of(scratch, word(job, HEAD_DIM), word(job, VALUE_DIM))
    piece = find(job, claim(job, 1), word(job, FIRST_SEQUENCE), 0, ROWS)
    while piece.rows > 0:
        set_queries(job, areas, piece)
        first, end = max(0, piece.lowest - word(job, WINDOW) + 1), piece.highest + 1
        start = first // GROUP * GROUP
        fresh = True
        while start < end:
            stop = min(end, start // TILE * TILE + TILE)
            groups = list_groups(job, piece.sequence, piece.head, start, stop, areas.lists)
            hide_unseen(job, areas.edges, start, first, end, groups, areas.lists + VALUES_LIST)
            if is_quantised(job):
                gather_scales(job, areas.lists, start, first, end, areas.scales)
            lay_keys(job, areas, groups)
            lay_values(job, areas, groups)
            attend(job, areas, piece, start, groups * GROUP, fresh)
            start, fresh = stop, False
        put_out(job, areas, piece)
        piece = find(job, claim(job, 1), piece.sequence, piece.base, ROWS)
    release(job)


@part_of_kernel
def set_queries(job: Any, areas: Any, piece: Any) -> None:
    """Packs the rows' queries, and resets their state."""
    dim, group = word(job, HEAD_DIM), word(job, HEADS) // word(job, KV_HEADS)
    token_bytes = word(job, HEADS) * dim * ELEMENT_BYTES
    for row in range(0, piece.rows, STRIP):
        list_rows(job, areas, piece, row, word(job, QUERIES), token_bytes, dim)
        for i in range(row, row + STRIP):
            number = piece.row % group + min(i, piece.rows - 1)
            put_float(areas.positions + i * 4, piece.lowest + number // group)
            head = piece.head * group + number % group
            begin_row(job, areas.maxima + i * 4, areas.totals + i * 4, head)
        target = areas.queries + row * dim * ELEMENT_BYTES
        for first in range(0, dim, TILE_INPUTS):
            transpose_rows(job, areas.rows, first, dim - first, target, VECTOR_BYTES)
            target += TILE_BYTES


@part_of_kernel
def list_rows(
    job: Any, areas: Any, piece: Any, row: Any, base: Any, token_bytes: Any, dim: Any
) -> None:
    """Where the strip's rows are in a tensor [tokens, heads, dim]. What is beyond the piece's last
    row is another copy of it."""
    group = word(job, HEADS) // word(job, KV_HEADS)
    token = query_start(job, piece.sequence)
    for i in range(STRIP):
        number = piece.row + min(row + i, piece.rows - 1)
        place = base + (token + number // group) * token_bytes
        place += (piece.head * group + number % group) * dim * ELEMENT_BYTES
        put_int64(areas.rows + i * ADDRESS_BYTES, place)


@part_of_kernel
def position_of(areas: Any, row: Any) -> Any:
    return int(float_at(areas.positions + row * 4))


@part_of_kernel
def lay_keys(job: Any, areas: Any, groups: Any) -> None:
    """Tokens beyond the last group get scores, too, which are not looked at."""
    dim = word(job, HEAD_DIM)
    if is_quantised(job):
        widen(job, areas.lists, groups, dim, areas.keys, areas.lists)
        return
    size = GROUP * dim * ELEMENT_BYTES
    for group in range(groups):
        copy(areas.keys + group * size, int64_at(areas.lists + group * ADDRESS_BYTES), size)


@part_of_kernel
def lay_values(job: Any, areas: Any, groups: Any) -> None:
    """Tokens beyond the last group have values of zero."""
    dim, values = word(job, VALUE_DIM), areas.lists + VALUES_LIST
    if is_quantised(job):
        widen(job, values, groups, dim, areas.widened, values)
    row = dim * 4
    lay_rows(job, values, groups, dim, areas.pairs, row)
    pairs = groups * GROUP // 2
    zero(areas.pairs + pairs * row, (TILE // 2 - pairs) * row)
    for element in range(0, dim, TILE_ROWS):
        target = areas.values + element // TILE_ROWS * VALUES_STEP
        for pair in range(0, TILE // 2, TILE_ROWS):
            turn(areas.pairs + pair * row + element * 4, row, target, LINE_BYTES)
            target += TILE_BYTES


@part_of_kernel
def attend(job: Any, areas: Any, piece: Any, start: Any, tokens: Any, fresh: Any) -> None:
    """All rows that see something of the tile."""
    row = 0
    while position_of(areas, row + STRIP - 1) < start:
        row += STRIP
    while row < piece.rows:
        score(job, areas, row)
        limit(job, areas, row, start, tokens)
        soften(job, areas, row, tokens, fresh)
        weigh(job, areas, row, fresh)
        row += STRIP


@part_of_kernel
def score(job: Any, areas: Any, row: Any) -> None:
    dim = word(job, HEAD_DIM)
    four(
        job,
        areas.keys,
        dim * ELEMENT_BYTES,
        LINE_BYTES,
        areas.queries + row * dim * ELEMENT_BYTES,
        LINE_BYTES,
        TILE_BYTES,
        0,
        dim // TILE_INPUTS,
        areas.scores,
        VECTOR_BYTES,
        False,
        0,
        0,
    )


@part_of_kernel
def limit(job: Any, areas: Any, row: Any, start: Any, tokens: Any) -> None:
    """Scales the scores by those of quantised keys, caps them, and hides those of tokens that a
    row does not see."""
    scores = areas.scores
    if is_quantised(job):
        for t in range(tokens):
            place = scores + t * VECTOR_BYTES
            scale = float_at(areas.scales + t * SCALE_BYTES)
            store_fp32(place, load_fp32(place, LANES) * scale, LANES)
    if real(job, SOFT_CAP) != 0.0:
        for place in range(scores, scores + tokens * VECTOR_BYTES, VECTOR_BYTES):
            store_fp32(place, scaled_score(job, load_fp32(place, LANES)), LANES)
    window = word(job, WINDOW)
    first = max(0, position_of(areas, row) + 1 - start)
    if start < position_of(areas, row + STRIP - 1) - window + 1:
        first = 0
    positions = load_fp32(areas.positions + row * 4, LANES)
    for t in range(first, tokens):
        place = scores + t * VECTOR_BYTES
        seen = where_between(load_fp32(place, LANES), start + t, positions, window, MASKED)
        store_fp32(place, seen, LANES)


@part_of_kernel
def soften(job: Any, areas: Any, row: Any, tokens: Any, fresh: Any) -> None:
    """Scores to weights relative to each row's maximum."""
    scale = 1.0 if real(job, SOFT_CAP) != 0.0 else real(job, SCALE)
    state = row * 4
    highest = highest_of(areas.scores, tokens) * scale
    before = load_fp32(areas.maxima + state, LANES)
    peak = above(highest, before + LAZY, highest, before)
    added = load_fp32(areas.totals + state, LANES)
    if largest(peak - before) > 0.0:
        factor = power_of_two(before - peak)
        store_fp32(areas.maxima + state, peak, LANES)
        added = added * factor
        if not fresh:
            shrink(job, areas, row, factor)
    added = exponentiate(job, areas, tokens, splat(scale), splat(0.0) - peak, added)
    store_fp32(areas.totals + state, added, LANES)


@part_of_kernel
def highest_of(scores: Any, tokens: Any) -> Any:
    """Four at a time, as one maximum after the other waits for the one before."""
    a = b = c = d = splat(MASKED)
    for place in range(scores, scores + tokens * VECTOR_BYTES, 4 * VECTOR_BYTES):
        a = maximum(a, load_fp32(place, LANES))
        b = maximum(b, load_fp32(place + VECTOR_BYTES, LANES))
        c = maximum(c, load_fp32(place + 2 * VECTOR_BYTES, LANES))
        d = maximum(d, load_fp32(place + 3 * VECTOR_BYTES, LANES))
    return maximum(maximum(a, b), maximum(c, d))


@part_of_kernel
def shrink(job: Any, areas: Any, row: Any, factor: Any) -> None:
    row_bytes = word(job, VALUE_DIM) * 4
    sums = areas.sums + row * row_bytes
    for place in range(sums, sums + STRIP * row_bytes, VECTOR_BYTES):
        store_fp32(place, load_fp32(place, LANES) * factor, LANES)


@part_of_kernel
def exponentiate(job: Any, areas: Any, tokens: Any, scale: Any, none: Any, added: Any) -> Any:
    """The strip's weights, and `added` plus their total; where the cache is quantised, weights
    times the scales of the values."""
    others, scales = splat(0.0), areas.scales + TILE * SCALE_BYTES
    for t in range(0, tokens, 2):
        place = areas.scores + t * VECTOR_BYTES
        x = weight_of(job, fma(load_fp32(place, LANES), scale, none))
        y = weight_of(job, fma(load_fp32(place + VECTOR_BYTES, LANES), scale, none))
        added, others = added + x, others + y
        if is_quantised(job):
            x = x * float_at(scales + t * SCALE_BYTES)
            y = y * float_at(scales + (t + 1) * SCALE_BYTES)
        pair_up(areas.weights + t // 2 * VECTOR_BYTES, x, y)
    beyond = (TILE - tokens) // 2 * VECTOR_BYTES
    zero(areas.weights + WEIGHTS_BYTES - beyond, beyond)
    return added + others


@part_of_kernel
def weigh(job: Any, areas: Any, row: Any, fresh: Any) -> None:
    dim = word(job, VALUE_DIM)
    sums = areas.sums + row * dim * 4
    weigh_values(job, areas.weights, areas.values, dim // TILE_ROWS, sums, not fresh)


@part_of_kernel
def put_out(job: Any, areas: Any, piece: Any) -> None:
    dim, place = word(job, VALUE_DIM), areas.scores
    for row in range(0, piece.rows, STRIP):
        list_rows(job, areas, piece, row, word(job, OUT), word(job, OUT_ROW), dim)
        factor = splat(1.0) / load_fp32(areas.totals + row * 4, LANES)
        shrink(job, areas, row, factor)
        for element in range(0, dim, LANES):
            turn(areas.sums + (row * dim + element * STRIP) * 4, VECTOR_BYTES, place, VECTOR_BYTES)
            for i in range(min(STRIP, piece.rows - row)):
                target = int64_at(areas.rows + i * ADDRESS_BYTES) + element * ELEMENT_BYTES
                store(job, target, load_fp32(place + i * VECTOR_BYTES, LANES), LANES)
