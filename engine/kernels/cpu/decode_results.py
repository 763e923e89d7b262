"""From the sums of a piece to the output: at once, or by merging the pieces of a sequence."""

from typing import Any

from engine.kernels.cpu.decode_state import HEADER, partial_bytes, row_floats
from engine.kernels.cpu.emit import LANES, VECTOR_BYTES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.memory import (
    copy,
    element_bytes,
    float_at,
    load_fp32,
    put_float,
    put_int64,
    store,
    store_fp32,
    word,
    zero,
)
from engine.kernels.cpu.paged import (
    ARRIVALS,
    FIRST_SEQUENCE,
    HEADS,
    KV_HEADS,
    OUT,
    OUT_ROW,
    PARTIALS,
    VALUE_DIM,
    query_start,
)
from engine.kernels.cpu.rows import straighten
from engine.kernels.cpu.sync import atomic_add
from engine.kernels.cpu.vectors import (
    fma,
    largest,
    power_of_two,
    splat,
    total,
)


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
    dim = word(job, VALUE_DIM)
    head = piece.head * (word(job, HEADS) // word(job, KV_HEADS)) + i
    out = word(job, OUT) + query_start(job, piece.sequence) * word(job, OUT_ROW)
    out += head * dim * element_bytes(job)
    for at in range(0, dim, LANES):
        value = load_fp32(sums + at * 4, LANES) * factor
        store(job, out + at * element_bytes(job), value, dim - at)
