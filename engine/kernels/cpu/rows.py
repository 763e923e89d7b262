"""Products of a few queries with the rows of a cache as they lie: what decoding needs.

Rows come in groups of eight tokens, the smallest block, so that a group is one run of memory
whose address stands in a list. Unlike in the tile of `tile.py` nothing is packed first: each
row is read once, and memory is what takes the time.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import (
    ELEMENT_BYTES,
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    LINE_BYTES,
    NARROW_INTS,
    SHORTS,
    SHORTS_32,
    const,
    lane_numbers,
    load_from,
    masked_load,
    memory_type,
    offset,
    parted,
    prefetch_line,
    splat_of,
    store_to,
    widened,
)
from engine.kernels.cpu.language import JOB, instruction
from engine.kernels.cpu.paged import ADDRESS_BYTES, GROUP
from engine.kernels.cpu.tile import multiply_add


def row_lanes(element: str) -> int:
    """Elements of a row that one vector takes."""
    return 2 * LANES if element == "bf16_dot" else LANES


def row_part(builder: Any, job: Any, address: Any, count: Any) -> Any:
    """A vector of a row: pairs to be multiplied, or fp32; `count` elements, or all if None."""
    element = job[1]
    if element == "bf16_dot":
        if count is None:
            return load_from(builder, address, INTS, 2)
        return builder.bitcast(masked_load(builder, address, SHORTS_32, count, 2), INTS)
    llvm, align = memory_type(element), ELEMENT_BYTES[element]
    if count is None:
        return widened(builder, load_from(builder, address, llvm, align), element)
    loaded = masked_load(builder, address, llvm, count, align, job[4])
    return widened(builder, loaded, element)


def parted_row_part(builder: Any, job: Any, address: Any, count: Any) -> Any:
    """The same for products with rows that are read alike: the elements of narrow bf16 are in an
    order of their own, which `straighten` undoes in sums of them."""
    if not has_parted(job):
        return row_part(builder, job, address, count)
    if count is None:
        return parted(builder, load_from(builder, address, NARROW_INTS, 2))
    loaded = masked_load(builder, address, SHORTS, count, 2, narrow=True)
    return parted(builder, builder.bitcast(loaded, NARROW_INTS))


def has_parted(job: Any) -> bool:
    return bool(job[4]) and job[1] == "bf16"


def for_row_parts(builder: Any, length: Any, lanes: int, body: Callable[[Any, Any], None]) -> None:
    """body(first element, None) for every full vector, body(first element, count) for a rest."""
    rest = builder.and_(length, const(lanes - 1))
    whole = builder.sub(length, rest)
    with cgutils.for_range_slice(builder, const(0), whole, const(lanes), I64) as (i, _):
        body(i, None)
    with builder.if_then(builder.icmp_signed(">", rest, const(0))):
        body(whole, rest)


def group_rows(builder: Any, groups: Any, index: Any, row_bytes: Any) -> list[Any]:
    """Addresses of the eight rows of the list's group `index`."""
    place = builder.add(groups, builder.mul(index, const(ADDRESS_BYTES)))
    rows = [load_from(builder, place, I64, 8)]
    for _ in range(GROUP - 1):
        rows.append(builder.add(rows[-1], row_bytes))
    return rows


@instruction(types.void, JOB, types.int64, types.int64, types.int64, types.int64)
def score_rows(b: Any, job: Any, query: Any, groups: Any, dim: Any, scores: Any) -> None:
    """The products of a query with two groups of keys, sixteen fp32. For pairs."""
    if job[1] != "bf16_dot":
        return
    element = job[1]
    size = const(ELEMENT_BYTES[element])
    rows = [row for i in range(2) for row in group_rows(b, groups, const(i), b.mul(dim, size))]
    sums = [cgutils.alloca_once_value(b, ir.Constant(FLOATS, None)) for _ in rows]

    def add(first: Any, count: Any) -> None:
        at = b.mul(first, size)
        q = row_part(b, job, b.add(query, at), count)
        for row, total in zip(rows, sums, strict=True):
            key = row_part(b, job, b.add(row, at), count)
            b.store(multiply_add(b, element, b.load(total), q, key), total)

    for_row_parts(b, dim, row_lanes(element), add)
    store_to(b, lane_totals(b, [b.load(total) for total in sums]), scores, 4)


def ask_for_group(builder: Any, element: str, group: Any, at: Any, lanes: int) -> None:
    """For as many lines of a group as its rows take for so many elements, `at` being where these
    begin in a row: while rows are read part by part, each line once, and in order."""
    first = builder.add(group, builder.mul(at, const(GROUP)))
    for line in range(0, GROUP * lanes * ELEMENT_BYTES[element], LINE_BYTES):
        prefetch_line(builder, offset(builder, first, line))


def _score_group(queries: int) -> Any:
    """The products of so many queries with one group of keys, each of which is widened once for all
    of them; asks for as many lines of the group at `ahead`. For wide registers, without pairs."""

    def write(
        b: Any,
        job: Any,
        query: Any,
        keys: Any,
        dim: Any,
        scores: Any,
        scores_row: Any,
        ahead: Any,
    ) -> None:
        if job[4] or job[1] == "bf16_dot":
            return
        size = const(ELEMENT_BYTES[job[1]])
        row_bytes = b.mul(dim, size)
        rows = [b.add(keys, b.mul(row_bytes, const(i))) for i in range(GROUP)]
        starts = [b.add(query, b.mul(row_bytes, const(q))) for q in range(queries)]
        nothing = ir.Constant(FLOATS, None)
        sums = [[cgutils.alloca_once_value(b, nothing) for _ in rows] for _ in starts]

        def add(first: Any, count: Any) -> None:
            at = b.mul(first, size)
            parts = [row_part(b, job, b.add(start, at), count) for start in starts]
            if not job[3]:
                ask_for_group(b, job[1], ahead, at, LANES)
            for r, row in enumerate(rows):
                key = row_part(b, job, b.add(row, at), count)
                for part, totals in zip(parts, sums, strict=True):
                    b.store(multiply_add(b, job[1], b.load(totals[r]), part, key), totals[r])

        for_row_parts(b, dim, LANES, add)
        for q, totals in enumerate(sums):
            vectors = [b.load(total) for total in totals]
            place = b.add(scores, b.mul(scores_row, const(q)))
            store_to(b, lane_totals(b, vectors), place, 4)

    return instruction(types.void, JOB, *[types.int64] * 6)(write)


score_group_1, score_group_2, score_group_3 = (_score_group(queries) for queries in (1, 2, 3))


def lane_totals(builder: Any, vectors: list[Any], lanes: int = LANES) -> Any:
    """The sums over the lanes of as many vectors as they have lanes, or half of that, as one
    vector of as many."""
    count = len(vectors)
    width = count // 2
    while width:
        kept, moved = halves(width, lanes)
        vectors = [
            builder.fadd(builder.shuffle_vector(x, y, kept), builder.shuffle_vector(x, y, moved))
            for x, y in zip(vectors[:width], vectors[width:], strict=True)
        ]
        width //= 2
    if count == lanes:
        return vectors[0]
    lower, upper = (lane_numbers(range(start, start + count)) for start in (0, count))
    both = vectors[0]
    return builder.fadd(*(builder.shuffle_vector(both, both, half) for half in (lower, upper)))


def halves(width: int, lanes: int) -> tuple[Any, Any]:
    """Shuffles whose results add up to the halves of each 2 * width lanes of x, then of y; the
    first one leaves all lanes where they are, which takes a blend."""
    orders: list[list[int]] = [[], []]
    for start in range(0, lanes, 2 * width):
        lower, upper = range(start, start + width), range(start + width, start + 2 * width)
        orders[0] += [*lower, *(lanes + lane for lane in upper)]
        orders[1] += [*upper, *(lanes + lane for lane in lower)]
    return lane_numbers(orders[0]), lane_numbers(orders[1])


def _interleave(upper: int) -> Any:
    """Within each 128 bits, the lower (or upper) four elements of two rows, in pairs."""
    order = [
        element
        for lane in range(0, 2 * LANES, 8)
        for i in range(lane + 4 * upper, lane + 4 * upper + 4)
        for element in (i, 2 * LANES + i)
    ]
    return ir.Constant(ir.VectorType(I32, 2 * LANES), [ir.Constant(I32, i) for i in order])


def _weigh(queries: int) -> Any:
    """Adds weights times rows of values to the sums of so many queries, and asks for as many lines
    of the groups in `ahead` as it reads; not where the cache is quantised, as the rows were widened
    and others asked for then.

    With `bf16_dot`, weights are bf16 and two rows are interleaved in registers; doing that
    within 128 bits is cheapest, and leaves the sums in an order that `straighten` undoes. For wide
    registers.
    """

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
        if job[4]:
            return
        element, fetches = job[1], not job[3]
        size = const(ELEMENT_BYTES[element])
        vectors = row_lanes(element) // LANES

        def columns(first: Any, count: Any) -> None:
            start = b.add(sums, b.mul(first, const(4)))
            rows = [b.add(start, b.mul(sums_row, const(q))) for q in range(queries)]
            places = [offset(b, row, 64 * v) for row in rows for v in range(vectors)]
            totals = [
                cgutils.alloca_once_value(b, load_from(b, place, FLOATS, 4)) for place in places
            ]
            with cgutils.for_range(b, num_groups) as loop:
                values = group_rows(b, groups, loop.index, b.mul(dim, size))
                at = b.mul(first, size)
                parts = [row_part(b, job, b.add(row, at), count) for row in values]
                if fetches:
                    place = b.add(ahead, b.mul(loop.index, const(ADDRESS_BYTES)))
                    ask_for_group(b, element, load_from(b, place, I64, 8), at, row_lanes(element))
                for step, right in enumerate(_steps(b, element, parts)):
                    _add_step(b, element, weights, weights_row, loop.index, step, right, totals)
            for total, place in zip(totals, places, strict=True):
                store_to(b, b.load(total), place, 4)

        for_row_parts(b, dim, row_lanes(element), columns)

    return instruction(types.void, JOB, *[types.int64] * 8)(write)


def _steps(b: Any, element: str, parts: list[Any]) -> list[list[Any]]:
    """The vectors that one weight (pair) is multiplied with, for each weight of the group."""
    if element != "bf16_dot":
        return [[part] for part in parts]
    shorts = [b.bitcast(part, SHORTS_32) for part in parts]
    pairs = zip(shorts[::2], shorts[1::2], strict=True)
    return [[b.shuffle_vector(x, y, _interleave(i)) for i in range(2)] for x, y in pairs]


def _add_step(
    b: Any,
    element: str,
    weights: Any,
    weights_row: Any,
    group: Any,
    step: int,
    right: list[Any],
    totals: list[Any],
) -> None:
    number, per_group = (I32, 4) if element == "bf16_dot" else (F32, 8)
    at = b.mul(b.add(b.mul(group, const(per_group)), const(step)), const(4))
    for q in range(len(totals) // len(right)):
        place = b.add(b.add(weights, b.mul(weights_row, const(q))), at)
        left = splat_of(b, load_from(b, place, number, 2))
        for total, vector in zip(totals[q * len(right) :], right, strict=False):
            b.store(multiply_add(b, element, b.load(total), left, vector), total)


weigh_1, weigh_2, weigh_3, weigh_4 = (_weigh(queries) for queries in (1, 2, 3, 4))


@instruction(types.void, JOB, types.int64, types.int64)
def straighten(b: Any, job: Any, sums: Any, dim: Any) -> None:
    """Puts a row of sums that `weigh` left in its own order into that of the elements."""
    if has_parted(job):
        with cgutils.for_range_slice(b, const(0), dim, const(LANES), I64) as (i, _):
            place = b.add(sums, b.mul(i, const(4)))
            x = load_from(b, place, FLOATS, 4)
            order = [lane // 2 + lane % 2 * LANES // 2 for lane in range(LANES)]
            store_to(b, b.shuffle_vector(x, x, lane_numbers(order)), place, 4)
    if job[1] != "bf16_dot":
        return
    with cgutils.for_range_slice(b, const(0), dim, const(2 * LANES), I64) as (i, _):
        place = b.add(sums, b.mul(i, const(4)))
        x, y = (load_from(b, offset(b, place, 64 * v), FLOATS, 4) for v in range(2))
        for v in range(2):
            order = [
                source + lane
                for four in (8 * v, 8 * v + 4)
                for source in (0, LANES)
                for lane in range(four, four + 4)
            ]
            store_to(b, b.shuffle_vector(x, y, lane_numbers(order)), offset(b, place, 64 * v), 4)
