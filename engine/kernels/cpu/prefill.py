"""Attention of many query tokens of a sequence over its cached tokens, chunk or whole prompt.

A piece of work is 64 rows (a query token and one of the heads that share a KV head each) over
all the tokens they see, 64 at a time. Scores are computed transposed, a row of them for each
token: so keys are read from their blocks as they lie, the queries are what is packed, and the
maximum and the total over tokens are plain vector operations without shuffles.

Tiles of tokens begin at multiples of 64 of the sequence, and no row sees another one: a prompt
gives the same bits in whatever chunks it comes.
"""

from typing import Any

from engine.kernels.cpu.emit import LANES, VECTOR_BYTES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.laying import lay_rows, pair_up
from engine.kernels.cpu.memory import (
    claim,
    element_bytes,
    float_at,
    has_dot,
    int64_at,
    is_narrow,
    is_quantised,
    load_fp32,
    real,
    store_fp32,
    thread_number,
    word,
)
from engine.kernels.cpu.paged import (
    FIRST_SEQUENCE,
    GROUP,
    HEAD_DIM,
    MASKED,
    SCALE,
    SCALE_BYTES,
    SCRATCH,
    SCRATCH_STRIDE,
    SOFT_CAP,
    TILE,
    VALUE_DIM,
    VALUES_LIST,
    WINDOW,
    hide_unseen,
    list_groups,
    scaled_score,
)
from engine.kernels.cpu.prefill_state import (
    LAZY,
    ROW_BYTES,
    ROWS,
    areas_of,
    find,
    keys_row,
    put_out,
    set_queries,
    sums_row,
    values_row,
)
from engine.kernels.cpu.quantised import gather_scales, widen
from engine.kernels.cpu.tile import made_4x16, made_4x64
from engine.kernels.cpu.vectors import (
    LEAST_WEIGHT,
    above,
    fma,
    largest,
    maximum,
    power_of_two,
    splat,
    weight_of,
    where_between,
)


def prefill(job: Any) -> None:
    scratch = word(job, SCRATCH) + thread_number(job) * word(job, SCRATCH_STRIDE)
    areas = areas_of(scratch, word(job, HEAD_DIM), word(job, VALUE_DIM), element_bytes(job))
    piece = find(job, claim(job, 1), word(job, FIRST_SEQUENCE), 0, ROWS)
    while piece.rows > 0:
        set_queries(job, areas, piece)
        first, end = max(0, piece.lowest - word(job, WINDOW) + 1), piece.highest + 1
        start = first // GROUP * GROUP
        fresh = True
        while start < end:
            stop = min(end, start // TILE * TILE + TILE)
            groups = list_groups(job, piece.sequence, piece.head, start, stop, areas.lists)
            values = areas.lists + VALUES_LIST
            hide_unseen(job, areas.edges, start, first, end, groups, values)
            if is_quantised(job):
                gather_scales(job, areas.lists, start, first, end, areas.scales)
                widen(job, areas.lists, groups, word(job, HEAD_DIM), areas.widened, areas.lists)
            score(job, areas, groups)
            if is_quantised(job):
                scale_scores(areas, groups * GROUP)
            limit(job, areas, piece, start, groups * GROUP)
            soften(job, areas, groups * GROUP, fresh, piece.rows)
            weigh(job, areas, piece, groups, fresh)
            start, fresh = stop, False
        put_out(job, areas, piece)
        piece = find(job, claim(job, 1), piece.sequence, piece.base, ROWS)


@part_of_kernel
def score(job: Any, areas: Any, groups: Any) -> None:
    dim = word(job, HEAD_DIM)
    if has_dot(job):
        steps, row_bytes = dim // 2, dim * element_bytes(job)
    else:
        steps, row_bytes = dim, keys_row(dim)
        lay_rows(job, areas.lists, groups, dim, areas.keys, row_bytes)
    if is_narrow(job):
        score_narrow(job, areas, groups * GROUP, dim)
        return
    for four in range(0, groups * GROUP, 4):
        if has_dot(job):
            group = int64_at(areas.lists + four // GROUP * 8)
            keys = group + four % GROUP * row_bytes
        else:
            keys = areas.keys + four * row_bytes
        target = areas.scores + four * ROW_BYTES
        queries = areas.queries
        made_4x64(
            job, keys, row_bytes, 4, queries, ROW_BYTES, steps, target, ROW_BYTES, False, 0, 0, 0
        )


@part_of_kernel
def score_narrow(job: Any, areas: Any, tokens: Any, dim: Any) -> None:
    row_bytes, row = keys_row(dim), ROW_BYTES
    for at in range(0, row, VECTOR_BYTES):
        queries, scores = areas.queries + at, areas.scores + at
        for four in range(0, tokens, 4):
            keys, target = areas.keys + four * row_bytes, scores + four * row
            made_4x16(job, keys, row_bytes, 4, queries, row, dim, target, row, False, 0, 0, 0)


@part_of_kernel
def scale_scores(areas: Any, tokens: Any) -> None:
    """By the scales of the keys."""
    for t in range(tokens):
        scale = splat(float_at(areas.scales + t * SCALE_BYTES))
        row = areas.scores + t * ROW_BYTES
        for place in range(row, row + ROW_BYTES, 64):
            store_fp32(place, load_fp32(place, LANES) * scale, LANES)


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
        scores, scales = areas.scores + at, areas.scales + TILE * SCALE_BYTES
        added = exponentiate(job, scores, tokens, splat(scale), peak, added, scales)
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
def exponentiate(
    job: Any, scores: Any, tokens: Any, scale: Any, peak: Any, added: Any, scales: Any
) -> Any:
    """Weights in place of the scores of 16 rows, `added` plus their total; where the cache is
    quantised, weights times the scales of the values."""
    none, nothing = splat(0.0) - peak, splat(LEAST_WEIGHT)
    for t in range(0, tokens, 2):
        x = weight_of(job, fma(load_fp32(scores + t * ROW_BYTES, LANES), scale, none))
        y = weight_of(job, fma(load_fp32(scores + (t + 1) * ROW_BYTES, LANES), scale, none))
        added = added + x + y
        if is_quantised(job):
            # What is hidden has weighed next to nothing; beside zeros, which values often are
            # here, that would show.
            x = (x - nothing) * float_at(scales + t * SCALE_BYTES)
            y = (y - nothing) * float_at(scales + (t + 1) * SCALE_BYTES)
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
    values = areas.lists + VALUES_LIST
    if is_quantised(job):
        widen(job, values, groups, dim, areas.widened, values)
    lay_rows(job, values, groups, dim, areas.values, source_row)
    steps, add = groups * GROUP // 2 if has_dot(job) else groups * GROUP, not fresh
    for i in range(0, piece.rows, 4):
        weights, sums = areas.scores + i * 4, areas.sums + i * row
        at = 0
        while row - at >= 256 and not is_narrow(job):
            right = areas.values + at
            made_4x64(
                job, weights, 4, ROW_BYTES, right, source_row, steps, sums + at, row, add, 0, 0, 0
            )
            at += 256
        while at < row:
            right = areas.values + at
            made_4x16(
                job, weights, 4, ROW_BYTES, right, source_row, steps, sums + at, row, add, 0, 0, 0
            )
            at += 64
