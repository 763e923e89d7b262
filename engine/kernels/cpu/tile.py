"""The register tile under every matrix product: a few rows times 64 (or 16) columns.

    C[r][:] (+)= sum over i of  A[r][i] * B[i][:]

One number of A is broadcast over the lanes and multiplied with a row of B. With `bf16_dot`,
numbers and lanes are pairs of bf16 (two consecutive i) and `vdpbf16ps` adds both products. A row
of weights lies in their own type and is widened in registers, which with six rows of A costs a
sixth of what its products do, or in twelve bits (`short.py`); for many rows, a tile of four keeps
what it has made, for which one of six has no registers.

The largest has six rows: 24 sums, a row of B and a broadcast number take 29 of 32 registers. Where
there are 16 of half the width, it has 16 columns: 12, two and one. Rows do not see each other, and
each sums in order of i: a row's result is the same to the last bit, whatever rows are computed
beside it.

A core that somebody else's thread shares starts half as many instructions for us, which is less
than a tile of twelve sums needs beside its products. So several of its steps are written out, with
one counter for all of them; and of what is multiplied most of all.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import (
    ELEMENT_BYTES,
    F32,
    FLOATS,
    HALVES,
    I32,
    INTS,
    LANES,
    LINE_BYTES,
    NARROW_INTS,
    PAIRS,
    VECTOR_BYTES,
    call,
    const,
    in_two,
    load_from,
    offset,
    parted,
    prefetch_line,
    splat_of,
    store_to,
    widened,
)
from engine.kernels.cpu.language import JOB, instruction
from engine.kernels.cpu.short import COLUMNS, is_short, short_bytes, short_row

KEPT = 384 * COLUMNS * 4  # from the sums of a block of rows to what its first rows keep
UNROLLED = 4  # steps that are written out


def dot_pairs(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """vdpbf16ps: every lane of total plus the two products of the pairs in x and y."""
    x, y = builder.bitcast(x, PAIRS), builder.bitcast(y, PAIRS)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, x, y)


def multiply_add(builder: Any, element: str, total: Any, x: Any, y: Any) -> Any:
    if element == "bf16_dot":
        return dot_pairs(builder, total, x, y)
    return call(builder, "llvm.fma.v16f32", FLOATS, x, y, total)


def made_row(b: Any, job: Any, address: Any, id: Any, vectors: int) -> list[Any]:
    """A row of B that was made for the tile: fp32, or pairs."""
    lanes = INTS if job[1] == "bf16_dot" else FLOATS
    return [load_from(b, offset(b, address, 64 * v), lanes, 4) for v in range(vectors)]


def weights_row(b: Any, job: Any, address: Any, id: Any, vectors: int) -> list[Any]:
    """A row of a panel of weights; `id` is that of short ones."""
    element = job[1]
    if is_short(job):
        words = short_row(b, job, address, id, row_words(element, vectors) // (2 * LANES))
        return words if element == "bf16_dot" else columns_of(b, words)
    if element == "f16":
        places = [offset(b, address, 32 * v) for v in range(vectors)]
        return [widened(b, load_from(b, at, HALVES, 2), element) for at in places]
    if element != "bf16":
        return made_row(b, job, address, id, vectors)
    places = [offset(b, address, 64 * v) for v in range(vectors // 2)]
    return columns_of(b, [load_from(b, place, INTS, 4) for place in places])


def columns_of(b: Any, vectors: list[Any]) -> list[Any]:
    """Of bf16, 32 bits hold two columns that are sixteen apart, which takes one instruction to
    widen either."""
    columns = []
    for words in vectors:
        lower = b.shl(words, const(16, INTS))
        upper = b.and_(words, const(-1 << 16, INTS))
        columns += [b.bitcast(half, FLOATS) for half in (lower, upper)]
    return columns


def narrow_row(b: Any, job: Any, address: Any, id: Any, vectors: int) -> list[Any]:
    """The same where registers have eight lanes: the two columns are eight apart, so that one
    register of weights makes one vector. Short ones were made before."""
    if job[1] != "bf16":
        return weights_row(b, job, address, id, vectors)
    places = [offset(b, address, 32 * v) for v in range(vectors)]
    return [parted(b, load_from(b, place, NARROW_INTS, 4)) for place in places]


def narrow_short_row(b: Any, job: Any, address: Any, id: Any, vectors: int) -> list[Any]:
    """A whole step of short weights there."""
    if not is_short(job):
        return narrow_row(b, job, address, id, vectors)
    words = short_row(b, job, address, id, vectors // 2)
    return [parted(b, half) for vector in words for half in in_two(b, vector)]


def row_words(element: str, vectors: int) -> int:
    """Weights in a row of B: two for each column, or one."""
    return vectors * LANES * (2 if element == "bf16_dot" else 1)


def _tile(
    rows: int,
    vectors: int,
    fetched: int | None = 0,
    load_row: Callable[[Any, Any, Any, Any, int], list[Any]] = weights_row,
    narrow: bool | None = False,
    unrolled: int = 1,
    once: bool = False,
    keeps_at: int | None = None,
) -> Any:
    """The tile of so many rows and vectors of columns; distances are in bytes.

    On a CPU with other registers it is nothing, unless `narrow` is None. In each step it can ask
    for so many lines at `ahead`, as many as it reads if None, and goes on by `ahead_step` there; of
    steps that are written out and read half a line, every second one does. `once`: as in
    `prefetch_line`. So many bytes behind C, if not None, it keeps the rows of B that it has made.
    """

    def write(
        b: Any,
        job: Any,
        a: Any,
        a_row: Any,  # from one row of A to the next
        a_step: Any,  # from one number (pair) of a row to the next
        rhs: Any,
        rhs_step: Any,  # from one row of B to the next
        steps: Any,
        c: Any,
        c_row: Any,
        add: Any,  # whether C is added to, or overwritten
        ahead: Any,
        ahead_step: Any,
        ids: Any,  # of short weights, for each row of B
    ) -> None:
        if narrow not in (None, job[4]):
            return
        element = job[1]
        number = I32 if element == "bf16_dot" else F32
        row_bytes = vectors * LANES * ELEMENT_BYTES[element]
        if load_row is weights_row and is_short(job):
            row_bytes = short_bytes(row_words(element, vectors))
        asking = max(1, LINE_BYTES // row_bytes)
        lines = -(-row_bytes // LINE_BYTES) if fetched is None else fetched
        a_rows, c_rows = [a], [c]
        for _ in range(rows - 1):
            a_rows.append(b.add(a_rows[-1], a_row))
            c_rows.append(b.add(c_rows[-1], c_row))
        places = [offset(b, row, VECTOR_BYTES * v) for row in c_rows for v in range(vectors)]
        sums = [cgutils.alloca_once_value(b, ir.Constant(FLOATS, None)) for _ in places]
        with b.if_then(add):
            for total, place in zip(sums, places, strict=True):
                b.store(load_from(b, place, FLOATS, 4), total)

        def step(index: Any, asks: bool) -> None:
            place = b.add(rhs, b.mul(index, rhs_step))
            columns = load_row(b, job, place, b.add(ids, index), vectors)
            if keeps_at is not None:
                kept = b.add(offset(b, c, keeps_at), b.mul(index, const(vectors * VECTOR_BYTES)))
                for v, column in enumerate(columns):
                    store_to(b, column, offset(b, kept, v * VECTOR_BYTES), 4)
            wanted = b.add(ahead, b.mul(index, ahead_step))
            for i in range(lines if asks else 0):
                prefetch_line(b, offset(b, wanted, i * LINE_BYTES), once=once)
            along = b.mul(index, a_step)
            for r, row in enumerate(a_rows):
                left = splat_of(b, load_from(b, b.add(row, along), number, 2))
                for total, right in zip(sums[r * vectors :], columns, strict=False):
                    b.store(multiply_add(b, element, b.load(total), left, right), total)

        turns = b.sdiv(steps, const(unrolled))
        with cgutils.for_range(b, turns) as loop:
            first = b.mul(loop.index, const(unrolled))
            for i in range(unrolled):
                step(b.add(first, const(i)), i % asking == 0)
        done = b.mul(turns, const(unrolled))
        with cgutils.for_range(b, b.sub(steps, done)) as loop:
            step(b.add(done, loop.index), True)
        for total, place in zip(sums, places, strict=True):
            store_to(b, b.load(total), place, 4)

    i = types.int64
    return instruction(types.void, JOB, i, i, i, i, i, i, i, i, types.boolean, i, i, i)(write)


narrow_1x64 = _tile(1, 4, None, load_row=narrow_row, narrow=True)
short_1x64 = _tile(1, 4, 2, load_row=narrow_short_row, narrow=True)
narrow_2x32 = _tile(2, 2, None, load_row=narrow_row, narrow=True)
narrow_4x16, narrow_6x16 = (
    _tile(rows, 1, 1, load_row=narrow_row, narrow=True, unrolled=UNROLLED) for rows in (4, 6)
)
tile_1x64, tile_2x64 = (_tile(rows, 4, fetched=None, once=True) for rows in (1, 2))
tile_4x64, tile_6x64 = (_tile(rows, 4, fetched=2, once=True) for rows in (4, 6))
far_6x64 = _tile(6, 4, fetched=2)  # for a part that stays in the second cache level
keeping_4x64 = _tile(4, 4, fetched=2, keeps_at=KEPT)
made_6x64 = _tile(6, 4, fetched=2, load_row=made_row, unrolled=UNROLLED)
made_4x64 = _tile(4, 4, load_row=made_row)
made_4x16 = _tile(4, 1, load_row=made_row, narrow=None, unrolled=UNROLLED)
