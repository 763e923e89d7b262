"""Laying rows of a cache, queries and weights the way the register tile reads them."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import (
    ELEMENT_BYTES,
    I32,
    I64,
    INTS,
    LANES,
    PAIRS,
    SHORTS_32,
    call,
    const,
    load_from,
    offset,
    store_to,
)
from engine.kernels.cpu.language import JOB, floats, instruction
from engine.kernels.cpu.paged import ADDRESS_BYTES, GROUP
from engine.kernels.cpu.rows import for_row_parts, group_rows, row_lanes, row_part


def _in_pairs(upper: int) -> Any:
    """The lower (or upper) sixteen elements of two rows, in pairs."""
    elements = range(LANES * upper, LANES * (upper + 1))
    order = [element for i in elements for element in (i, 2 * LANES + i)]
    return ir.Constant(ir.VectorType(I32, 2 * LANES), [ir.Constant(I32, i) for i in order])


@instruction(types.void, JOB, types.int64, types.int64, types.int64, types.int64, types.int64)
def lay_rows(
    b: Any, job: Any, groups: Any, num_groups: Any, dim: Any, target: Any, target_row: Any
) -> None:
    """Copies listed rows one after the other, as fp32, or with `bf16_dot` two rows in pairs."""
    element = job[1]
    size = const(ELEMENT_BYTES[element])
    per_group = GROUP // 2 if element == "bf16_dot" else GROUP
    with cgutils.for_range(b, num_groups) as loop:
        rows = group_rows(b, groups, loop.index, b.mul(dim, size))
        start = b.add(target, b.mul(b.mul(loop.index, const(per_group)), target_row))

        def columns(first: Any, count: Any) -> None:
            at = b.mul(first, size)
            parts = [row_part(b, job, b.add(row, at), count) for row in rows]
            place = b.add(start, b.mul(first, const(4)))
            for vectors in _laid(b, element, parts):
                for i, vector in enumerate(vectors):
                    store_to(b, vector, offset(b, place, 64 * i), 4)
                place = b.add(place, target_row)

        for_row_parts(b, dim, row_lanes(element), columns)


def _laid(b: Any, element: str, parts: list[Any]) -> list[list[Any]]:
    if element != "bf16_dot":
        return [[part] for part in parts]
    shorts = [b.bitcast(part, SHORTS_32) for part in parts]
    pairs = zip(shorts[::2], shorts[1::2], strict=True)
    return [[b.shuffle_vector(x, y, _in_pairs(i)) for i in range(2)] for x, y in pairs]


@instruction(types.void, JOB, types.int64, types.int64, types.int64, types.int64, types.int64)
def transpose_rows(
    b: Any, job: Any, rows: Any, first: Any, count: Any, target: Any, target_row: Any
) -> None:
    """Elements (pairs with `bf16_dot`) from `first` on of sixteen listed rows, as columns."""
    element = job[1]
    lanes = row_lanes(element)
    at = b.mul(first, const(ELEMENT_BYTES[element]))
    places = [
        b.add(load_from(b, offset(b, rows, ADDRESS_BYTES * i), I64, 8), at) for i in range(LANES)
    ]

    def put(available: Any) -> None:
        vectors = [row_part(b, job, place, available) for place in places]
        for i, vector in enumerate(transposed(b, vectors)):
            store_to(b, vector, b.add(target, b.mul(target_row, const(i))), 4)

    with b.if_else(b.icmp_signed(">=", count, const(lanes))) as (whole, part):
        with whole:
            put(None)
        with part:
            put(count)


@instruction(types.void, types.int64, types.int64, types.int64, types.int64)
def turn(b: Any, source: Any, source_row: Any, target: Any, target_row: Any) -> None:
    """Sixteen rows of sixteen pairs, transposed."""
    rows = [b.add(source, b.mul(source_row, const(i))) for i in range(LANES)]
    vectors = [load_from(b, row, INTS, 4) for row in rows]
    for i, vector in enumerate(transposed(b, vectors)):
        store_to(b, vector, b.add(target, b.mul(target_row, const(i))), 4)


def transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen lanes, by exchanging ever smaller blocks of lanes."""
    for width in (8, 4, 2, 1):
        low = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
        high = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
        masks = [ir.Constant(INTS, [ir.Constant(I32, i) for i in order]) for order in (low, high)]
        exchanged = list(vectors)
        for i in range(LANES):
            if not i & width:
                x, y = vectors[i], vectors[i + width]
                exchanged[i] = builder.shuffle_vector(x, y, masks[0])
                exchanged[i + width] = builder.shuffle_vector(x, y, masks[1])
        vectors = exchanged
    return vectors


@instruction(types.void, types.int64, floats, floats)
def pair_up(b: Any, address: Any, x: Any, y: Any) -> None:
    """Each lane of x and y as a pair of bf16, for `bf16_dot`: one vcvtne2ps2bf16, one vpermw."""
    both = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, y, x)
    store_to(b, b.shuffle_vector(both, both, _zip_halves()), address, 4)


def _zip_halves() -> Any:
    order = [element for i in range(LANES) for element in (i, LANES + i)]
    return ir.Constant(ir.VectorType(I32, 2 * LANES), [ir.Constant(I32, i) for i in order])
