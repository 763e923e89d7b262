"""The products of `rows.py` where registers are sixteen of eight lanes.

A row is widened once for as many queries as the registers have sums for: three, twelve sums. What
a sum is multiplied with comes out of memory, so queries are widened before.
"""

from itertools import chain
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import (
    ELEMENT_BYTES,
    F32,
    FLOATS,
    I64,
    LANES,
    LINE_BYTES,
    NARROW_FLOATS,
    VECTOR_BYTES,
    call,
    const,
    in_two,
    load_from,
    offset,
    prefetch_line,
    splat_of,
    store_to,
)
from engine.kernels.cpu.language import JOB, instruction
from engine.kernels.cpu.paged import ADDRESS_BYTES, GROUP
from engine.kernels.cpu.rows import for_row_parts, lane_totals, parted_row_part
from engine.kernels.cpu.tile import multiply_add

NARROW_ROWS = 4  # that `score_narrow` takes: half a group


def loaded_again(builder: Any) -> None:
    """No instruction, and nothing that was loaded before it is kept in a register for later: what
    is used once is an operand in memory, and the registers are left to sums."""
    builder.fence("seq_cst", "singlethread")


@instruction(types.void, JOB, types.int64, types.int64, types.int64)
def widen_query(b: Any, job: Any, query: Any, dim: Any, target: Any) -> None:
    """To fp32 for `score_narrow`, in the order that keys are read in there, with zeros behind."""

    def write(first: Any, count: Any) -> None:
        part = parted_row_part(b, job, b.add(query, b.mul(first, size)), count)
        store_to(b, part, b.add(target, b.mul(first, const(4))), 4)

    if job[4]:
        size = const(ELEMENT_BYTES[job[1]])
        for_row_parts(b, dim, LANES, write)


def _score_narrow(queries: int) -> Any:
    """The products of so many widened queries with NARROW_ROWS keys, as many fp32 for each."""

    def write(
        b: Any,
        job: Any,
        widened_queries: Any,
        query_bytes: Any,
        keys: Any,
        dim: Any,
        scores: Any,
        scores_row: Any,
    ) -> None:
        if not job[4]:
            return
        size, half = const(ELEMENT_BYTES[job[1]]), LANES // 2
        rows = [b.add(keys, b.mul(b.mul(dim, size), const(i))) for i in range(NARROW_ROWS)]
        starts = [b.add(widened_queries, b.mul(query_bytes, const(q))) for q in range(queries)]
        nothing = ir.Constant(NARROW_FLOATS, None)
        sums = [[cgutils.alloca_once(b, NARROW_FLOATS) for _ in rows] for _ in starts]
        for total in chain.from_iterable(sums):
            b.store(nothing, total)

        def add(first: Any, count: Any) -> None:
            at, along = b.mul(first, size), b.mul(first, const(4))
            for r, row in enumerate(rows):
                key = in_two(b, parted_row_part(b, job, b.add(row, at), count))
                loaded_again(b)
                for start, totals in zip(starts, sums, strict=True):
                    value = b.load(totals[r])
                    for i, part in enumerate(key):
                        place = offset(b, b.add(start, along), i * half * 4)
                        query = load_from(b, place, NARROW_FLOATS, 4)
                        value = call(b, "llvm.fma.v8f32", NARROW_FLOATS, query, part, value)
                    b.store(value, totals[r])

        for_row_parts(b, dim, LANES, add)
        for q, totals in enumerate(sums):
            vectors = [b.load(total) for total in totals]
            place = b.add(scores, b.mul(scores_row, const(q)))
            store_to(b, lane_totals(b, vectors, half), place, 4)

    return instruction(types.void, JOB, *[types.int64] * 6)(write)


score_narrow_1, score_narrow_2, score_narrow_3 = (_score_narrow(queries) for queries in (1, 2, 3))


def _weigh_narrow(queries: int) -> Any:
    """Adds weights times rows of values to the sums of so many queries, 32 columns at a time, and
    asks for the same lines of the groups in `ahead`, as `weigh_1` and its like in `rows.py`."""

    def write(
        b: Any,
        job: Any,
        weights: Any,
        weights_row: Any,
        groups: Any,
        num_groups: Any,
        dim: Any,
        sums: Any,
        sums_row: Any,
        ahead: Any,
    ) -> None:
        if not job[4]:
            return
        fetches, element_size = not job[3], ELEMENT_BYTES[job[1]]
        size, row_bytes = const(element_size), b.mul(dim, const(element_size))
        lines = range(0, 2 * LANES * element_size, LINE_BYTES)

        def columns(first: Any, count: Any) -> None:
            at, start = b.mul(first, size), b.add(sums, b.mul(first, const(4)))
            rows = [b.add(start, b.mul(sums_row, const(q))) for q in range(queries)]
            places = [[offset(b, row, VECTOR_BYTES * v) for row in rows] for v in range(2)]
            totals = [
                [cgutils.alloca_once_value(b, load_from(b, place, FLOATS, 4)) for place in half]
                for half in places
            ]
            with cgutils.for_range(b, num_groups) as loop:
                listed = b.mul(loop.index, const(ADDRESS_BYTES))
                row, later = (
                    b.add(load_from(b, b.add(g, listed), I64, 8), at) for g in (groups, ahead)
                )
                token = b.mul(loop.index, const(GROUP))
                every = b.mul(row_bytes, const(GROUP))
                with cgutils.for_range_slice(b, const(0), every, row_bytes, I64) as (along, r):
                    for line in lines if fetches else ():
                        prefetch_line(b, offset(b, b.add(later, along), line))
                    weight = b.add(weights, b.mul(b.add(token, r), const(4)))
                    for v in range(2):
                        place = offset(b, b.add(row, along), LANES * element_size * v)
                        right = _half_part(b, job, place, count, LANES * v)
                        loaded_again(b)
                        for q, total in enumerate(totals[v]):
                            of_query = b.add(weight, b.mul(weights_row, const(q)))
                            left = splat_of(b, load_from(b, of_query, F32, 4))
                            b.store(multiply_add(b, "f32", b.load(total), left, right), total)
            for half, targets in zip(totals, places, strict=True):
                for total, place in zip(half, targets, strict=True):
                    store_to(b, b.load(total), place, 4)

        for_row_parts(b, dim, 2 * LANES, columns)

    return instruction(types.void, JOB, *[types.int64] * 8)(write)


def _half_part(b: Any, job: Any, address: Any, count: Any, before: int) -> Any:
    """What `parted_row_part` reads, `before` elements behind where `count` of them begin."""
    if count is None:
        return parted_row_part(b, job, address, None)
    part = cgutils.alloca_once(b, FLOATS)
    left = b.sub(count, const(before))
    with b.if_else(b.icmp_signed(">=", left, const(LANES))) as (whole, rest):
        with whole:
            b.store(parted_row_part(b, job, address, None), part)
        with rest:
            b.store(parted_row_part(b, job, address, left), part)
    return b.load(part)


weigh_narrow_1, weigh_narrow_2, weigh_narrow_3 = (_weigh_narrow(queries) for queries in (1, 2, 3))
