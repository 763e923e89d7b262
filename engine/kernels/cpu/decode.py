"""Attention of one query token for each sequence over its cached tokens.

A piece of work is one KV head of one sequence, over at most SPLIT tokens counted from the
sequence's start; the thread that finishes a sequence's head last merges its pieces. So one long
sequence and many short ones both keep all threads busy, and what a sequence gets does not
depend on its neighbours, to the last bit.

Within a piece, tokens go by in tiles of 64, and while a tile is computed the next one's rows
are fetched, beyond the end of the piece too.
"""

from typing import Any

from engine.kernels.cpu.decode_results import finish
from engine.kernels.cpu.decode_state import (
    TILE_BYTES,
    areas_of,
    find,
    padded,
    row_floats,
)
from engine.kernels.cpu.emit import LANES, LINE_BYTES, VECTOR_BYTES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.memory import (
    claim,
    element_bytes,
    float_at,
    has_dot,
    int64_at,
    is_narrow,
    is_quantised,
    load_fp32,
    prefetch,
    put_float,
    store,
    store_fp32,
    thread_number,
    word,
    zero,
)
from engine.kernels.cpu.narrow_rows import (
    NARROW_ROWS,
    score_narrow_1,
    score_narrow_2,
    score_narrow_3,
    weigh_narrow_1,
    weigh_narrow_2,
    weigh_narrow_3,
    widen_query,
)
from engine.kernels.cpu.paged import (
    ADDRESS_BYTES,
    FIRST_SEQUENCE,
    GROUP,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LIST_BYTES,
    LOWEST,
    MASKED,
    QUERIES,
    TILE,
    VALUE_DIM,
    VALUES_LIST,
    WINDOW,
    begin_row,
    hide_unseen,
    kv_len,
    list_groups,
    query_start,
    scaled_score,
)
from engine.kernels.cpu.quantised import gather_scales, widen
from engine.kernels.cpu.rows import (
    score_group_1,
    score_group_2,
    score_group_3,
    score_rows,
    weigh_1,
    weigh_2,
    weigh_3,
    weigh_4,
)
from engine.kernels.cpu.vectors import (
    LEAST_WEIGHT,
    kept,
    largest,
    maximum,
    power_of_two,
    splat,
    weight_of,
)


def decode(job: Any) -> None:
    areas = areas_of(job, thread_number(job))
    current, following = areas.lists, areas.lists + LIST_BYTES
    piece = find(job, claim(job, 1), word(job, FIRST_SEQUENCE), 0)
    start = piece.first // GROUP * GROUP
    groups = list_groups(job, piece.sequence, piece.head, start, piece.end, current)
    while groups > 0:
        begin(job, areas, piece)
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
            if is_quantised(job):
                gather_scales(job, current, start - TILE, piece.first, piece.end, areas.scales)
            score(job, areas, piece, current, groups, ahead)
            soften(job, areas, piece, start - TILE, groups)
            weigh(job, areas, piece, start - TILE, groups, current, ahead)
            current, following = following, current
            groups = next_groups
        finish(job, areas, piece)
        piece = upcoming
        start = piece.first // GROUP * GROUP


@part_of_kernel
def begin(job: Any, areas: Any, piece: Any) -> None:
    if is_narrow(job):
        dim, query = word(job, HEAD_DIM), first_query(job, piece)
        for i in range(word(job, HEADS) // word(job, KV_HEADS)):
            target = areas.queries + i * row_floats(dim) * 4
            widen_query(job, query + i * dim * element_bytes(job), dim, target)
    group = word(job, HEADS) // word(job, KV_HEADS)
    queries = padded(group)
    for i in range(queries):
        put_float(areas.maxima + i * VECTOR_BYTES, LOWEST)
    end = areas.sums + queries * row_floats(word(job, VALUE_DIM)) * 4
    zero(areas.totals, end - areas.totals)
    # Of the pieces of a sequence the first one alone begins at the sinks.
    if piece.first == max(0, kv_len(job, piece.sequence) - word(job, WINDOW)):
        for i in range(group):
            at = i * VECTOR_BYTES
            begin_row(job, areas.maxima + at, areas.totals + at, piece.head * group + i)


@part_of_kernel
def first_query(job: Any, piece: Any) -> Any:
    """Of those that share the piece's KV head."""
    heads = word(job, HEADS)
    row = query_start(job, piece.sequence) * heads + piece.head * (heads // word(job, KV_HEADS))
    return word(job, QUERIES) + row * word(job, HEAD_DIM) * element_bytes(job)


@part_of_kernel
def score(job: Any, areas: Any, piece: Any, current: Any, groups: Any, ahead: Any) -> None:
    """The scores of a tile, and meanwhile the next tile's keys on their way."""
    if is_narrow(job):
        score_narrow(job, areas, current, groups, ahead)
        return
    if not has_dot(job):
        score_widened(job, areas, piece, current, groups, ahead)
        return
    dim = word(job, HEAD_DIM)
    queries = word(job, HEADS) // word(job, KV_HEADS)
    row_bytes = dim * element_bytes(job)
    query = first_query(job, piece)
    share = (2 * GROUP * row_bytes // LINE_BYTES + queries - 1) // queries
    for group in range(0, groups, 2):
        at = group * ADDRESS_BYTES
        if is_quantised(job):
            widen(job, current + at, 2, dim, areas.widened, ahead + at)
        for i in range(queries):
            if not is_quantised(job):
                fetch(ahead + at, i * share, share, GROUP * row_bytes // LINE_BYTES)
            scores = areas.scores + i * TILE_BYTES + group * GROUP * 4
            score_rows(job, query + i * row_bytes, current + at, dim, scores)


@part_of_kernel
def score_widened(job: Any, areas: Any, piece: Any, current: Any, groups: Any, ahead: Any) -> None:
    """With wide registers, but for pairs."""
    dim, queries = word(job, HEAD_DIM), word(job, HEADS) // word(job, KV_HEADS)
    query_bytes, first = dim * element_bytes(job), first_query(job, piece)
    for group in range(groups):
        at = group * ADDRESS_BYTES
        if is_quantised(job):
            widen(job, current + at, 1, dim, areas.widened, ahead + at)
        keys, later = int64_at(current + at), int64_at(ahead + at)
        scores = areas.scores + group * GROUP * 4
        i = 0
        while i < queries:
            query, to = first + i * query_bytes, scores + i * TILE_BYTES
            count = at_once(queries - i)
            if count == 3:
                score_group_3(job, query, keys, dim, to, TILE_BYTES, later)
            elif count == 2:
                score_group_2(job, query, keys, dim, to, TILE_BYTES, later)
            else:
                score_group_1(job, query, keys, dim, to, TILE_BYTES, later)
            i += count
            later = keys  # which is there: asking costs nothing


@part_of_kernel
def score_narrow(job: Any, areas: Any, current: Any, groups: Any, ahead: Any) -> None:
    dim, queries = word(job, HEAD_DIM), word(job, HEADS) // word(job, KV_HEADS)
    size, query_bytes = NARROW_ROWS * dim * element_bytes(job), row_floats(dim) * 4
    for group in range(groups):
        at = group * ADDRESS_BYTES
        if is_quantised(job):
            widen(job, current + at, 1, dim, areas.widened, ahead + at)
        for half in range(GROUP // NARROW_ROWS):
            keys = int64_at(current + at) + half * size
            if not is_quantised(job):
                for line in range(0, size, LINE_BYTES):
                    prefetch(int64_at(ahead + at) + half * size + line)
            scores = areas.scores + (group * GROUP + half * NARROW_ROWS) * 4
            i = 0
            while i < queries:
                query, to = areas.queries + i * query_bytes, scores + i * TILE_BYTES
                count = at_once(queries - i)
                if count == 3:
                    score_narrow_3(job, query, query_bytes, keys, dim, to, TILE_BYTES)
                elif count == 2:
                    score_narrow_2(job, query, query_bytes, keys, dim, to, TILE_BYTES)
                else:
                    score_narrow_1(job, query, query_bytes, keys, dim, to, TILE_BYTES)
                i += count


@part_of_kernel
def at_once(queries: Any) -> Any:
    """How many of those that are left share what is read, and widened."""
    return min(queries, 2) if queries < 3 or queries == 4 else 3


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
            value = load_fp32(scores + at * 4, LANES)
            if is_quantised(job):
                value = value * load_fp32(areas.scales + at * 4, LANES)
            value = scaled_score(job, value)
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
            if is_quantised(job):
                # Without what is next to nothing: a product that is subnormal takes long.
                weight = weight - LEAST_WEIGHT
                weight = weight * load_fp32(areas.scales + TILE_BYTES + at * 4, LANES)
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
    values, later = current + VALUES_LIST, ahead + VALUES_LIST
    hide_unseen(job, areas.edges, start, piece.first, piece.end, groups, values)
    dim = word(job, VALUE_DIM)
    if is_quantised(job):
        widen(job, values, groups, dim, areas.widened, later)
    row = row_floats(dim) * 4
    queries = word(job, HEADS) // word(job, KV_HEADS)
    i = 0
    while i < queries:
        weights, sums = areas.weights + i * TILE_BYTES, areas.sums + i * row
        if is_narrow(job):
            count = at_once(queries - i)
            if count == 3:
                weigh_narrow_3(job, weights, TILE_BYTES, values, groups, dim, sums, row, later)
            elif count == 2:
                weigh_narrow_2(job, weights, TILE_BYTES, values, groups, dim, sums, row, later)
            else:
                weigh_narrow_1(job, weights, TILE_BYTES, values, groups, dim, sums, row, later)
            i += count
        elif queries - i == 3:
            weigh_3(job, weights, TILE_BYTES, values, groups, dim, sums, row, later)
            i += 3
        elif queries - i > 3:
            weigh_4(job, weights, TILE_BYTES, values, groups, dim, sums, row, later)
            i += 4
        elif queries - i == 2:
            weigh_2(job, weights, TILE_BYTES, values, groups, dim, sums, row, later)
            i += 2
        else:
            weigh_1(job, weights, TILE_BYTES, values, groups, dim, sums, row, later)
            i += 1
        later = values
