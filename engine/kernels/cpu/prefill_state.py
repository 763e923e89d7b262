"""How prefilling is cut into pieces, and what a thread keeps in its scratch memory."""

from functools import cache
from typing import Any, NamedTuple

from engine.kernels.cpu.emit import LANES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.laying import transpose_rows
from engine.kernels.cpu.memory import (
    element_bytes,
    float_at,
    has_dot,
    load_fp32,
    put_float,
    put_int64,
    store,
    word,
)
from engine.kernels.cpu.paged import (
    END_SEQUENCE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LIST_BYTES,
    OUT,
    OUT_ROW,
    QUERIES,
    TILE,
    VALUE_DIM,
    begin_row,
    edge_bytes,
    kv_len,
    query_start,
)
from engine.kernels.cpu.quantised import SCALES_BYTES, widened_bytes

ROWS = 64
LAZY = 8.0  # a maximum is only renewed when it grew by 2 ** LAZY: sums are rescaled that rarely
ROW_BYTES = ROWS * 4  # one fp32 (or pair of bf16) for each row


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
    scales: int  # of a quantised tile's keys and values
    widened: int  # its keys, and then its values


@part_of_kernel
def rounded(number: int, multiple: int) -> Any:
    return (number + multiple - 1) // multiple * multiple


@part_of_kernel
def areas_of(start: int, dim: int, value_dim: int, element_size: int) -> Any:
    """The scratch that begins at `start`; what is not always needed is at its end."""
    lists = start + ROWS * 8
    edges = lists + LIST_BYTES
    positions = edges + edge_bytes(value_dim, element_size)
    queries = positions + 4 * ROW_BYTES
    scores = queries + rounded(dim, LANES) * ROW_BYTES
    sums = scores + TILE * ROW_BYTES
    values = sums + ROWS * sums_row(value_dim)
    keys = values + TILE * values_row(value_dim)
    scales = keys + TILE * keys_row(dim)
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
        scales,
        scales + SCALES_BYTES,
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
    widened: int = areas_of(0, dim, value_dim, element_size).widened
    return widened + widened_bytes(dim, value_dim, element_size)


@part_of_kernel
def find(job: Any, number: Any, sequence: Any, base: Any, most: Any) -> Any:
    """Piece `number` of at most so many rows, at or after the sequence whose first piece is `base`;
    no rows if none.

    The last rows, which see the most tokens, come first, so that short pieces end the work.
    """
    kv_heads = word(job, KV_HEADS)
    group = word(job, HEADS) // kv_heads
    while sequence < word(job, END_SEQUENCE):
        queries = query_start(job, sequence + 1) - query_start(job, sequence)
        tiles = (queries * group + most - 1) // most
        if number < base + tiles * kv_heads:
            head, tile = (number - base) // tiles, tiles - 1 - (number - base) % tiles
            row, rows = tile * most, min(most, queries * group - tile * most)
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
        head = piece.head * group + member
        begin_row(job, areas.maxima + i * 4, areas.totals + i * 4, head)
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
def put_out(job: Any, areas: Any, piece: Any) -> None:
    group, dim = word(job, HEADS) // word(job, KV_HEADS), word(job, VALUE_DIM)
    query, member = query_start(job, piece.sequence) + piece.row // group, piece.row % group
    for i in range(piece.rows):
        target = word(job, OUT) + query * word(job, OUT_ROW)
        target += (piece.head * group + member) * dim * element_bytes(job)
        member += 1
        if member == group:
            member, query = 0, query + 1
        factor = 1.0 / float_at(areas.totals + i * 4)
        sums = areas.sums + i * sums_row(dim)
        for at in range(0, dim, LANES):
            value = load_fp32(sums + at * 4, LANES) * factor
            store(job, target + at * element_bytes(job), value, dim - at)
