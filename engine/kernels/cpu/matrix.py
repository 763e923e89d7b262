"""AMX: registers that are tiles of 16 rows of 64 bytes, and the product of two of them.

`tdpbf16ps` adds the products of 16 rows and 32 inputs with as many inputs, in pairs, and 16
columns to 16 x 16 sums. Two tiles of either side make four tiles of sums, which are all eight
registers, and each that is loaded is used twice. A kernel says what shape the tiles have before
the first product, and lets go of them at its end.

In a kernel without tiles these instructions are nothing. Its branches for tiles are never taken,
but LLVM compiles what they call all the same, and ends the process over an instruction that the
CPU does not have.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import (
    I8,
    I16,
    I64,
    LINE_BYTES,
    call,
    const,
    offset,
    pointer,
    prefetch_line,
)
from engine.kernels.cpu.language import JOB, instruction

TILE_ROWS, TILE_INPUTS, TILE_BYTES = 16, 32, 1024
SUMS, X, WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # registers


def _tiles(num_x: int, num_weights: int) -> Any:
    """The product of tiles of x, one below the other, and one or two of weights side by side; four
    of sums at most.

    The distances in bytes: from a row to the next in a tile, from a step of 32 inputs to the next,
    and from the first tile of weights to the second. In every step it asks for so many of the
    lines at `ahead`, as there is time for that beside the products.
    """

    def write(
        b: Any,
        job: Any,
        x: Any,
        x_row: Any,
        x_step: Any,
        weights: Any,
        weights_row: Any,
        weights_step: Any,
        weights_tile: Any,
        steps: Any,
        sums: Any,
        sums_row: Any,
        add: Any,  # whether sums are added to, or overwritten
        ahead: Any,
        lines: Any,
    ) -> None:
        if not job[2]:
            return
        x_tiles, sums_tiles = [const(0)], [sums]
        for _ in range(num_x - 1):
            x_tiles.append(b.add(x_tiles[-1], b.mul(x_row, const(TILE_ROWS))))
            sums_tiles.append(b.add(sums_tiles[-1], b.mul(sums_row, const(TILE_ROWS))))
        places = [
            (SUMS[num_weights * r + c], offset(b, tile, c * LINE_BYTES))
            for r, tile in enumerate(sums_tiles)
            for c in range(num_weights)
        ]
        with b.if_else(add) as (more, new):
            with more:
                for register, place in places:
                    _load(b, register, place, sums_row)
            with new:
                for register, _ in places:
                    _of_tiles(b, "zero", register)
        with cgutils.for_range(b, steps) as loop:
            place = b.add(weights, b.mul(loop.index, weights_step))
            along = b.add(x, b.mul(loop.index, x_step))
            wanted = b.add(ahead, b.mul(b.mul(loop.index, lines), const(LINE_BYTES)))
            with cgutils.for_range(b, lines) as line:
                prefetch_line(b, b.add(wanted, b.mul(line.index, const(LINE_BYTES))))
            for c in range(num_weights):
                _load(b, WEIGHTS[c], b.add(place, weights_tile) if c else place, weights_row)
            for r, tile in enumerate(x_tiles):
                register = X[r % len(X)]
                _load(b, register, b.add(along, tile), x_row)
                for c in range(num_weights):
                    _of_tiles(b, "dpbf16ps", SUMS[num_weights * r + c], register, WEIGHTS[c])
        for register, place in places:
            _store(b, register, place, sums_row)

    i = types.int64
    return instruction(types.void, JOB, i, i, i, i, i, i, i, i, i, i, types.boolean, i, i)(write)


def _of_tiles(builder: Any, name: str, *registers: int) -> None:
    numbers = [const(one, I8) for one in registers]
    prefix = "t" if name.startswith("dp") else "tile"
    call(builder, f"llvm.x86.{prefix}{name}", ir.VoidType(), *numbers)


def _load(builder: Any, register: int, address: Any, row_bytes: Any) -> None:
    place = pointer(builder, address, I8)
    call(builder, "llvm.x86.tileloadd64", ir.VoidType(), const(register, I8), place, row_bytes)


def _store(builder: Any, register: int, address: Any, row_bytes: Any) -> None:
    place = pointer(builder, address, I8)
    call(builder, "llvm.x86.tilestored64", ir.VoidType(), const(register, I8), place, row_bytes)


one, two, four = _tiles(1, 2), _tiles(2, 2), _tiles(4, 1)


@instruction(types.void, JOB, *[types.int64] * 4, types.boolean)
def weigh_values(
    b: Any, job: Any, weights: Any, values: Any, count: Any, sums: Any, add: Any
) -> None:
    """So many tiles of sums, each the product of two tiles of values beside each other and two of
    weights one below the other. All lie in a row."""
    if not job[2]:
        return
    row = const(LINE_BYTES)
    for i, register in enumerate(WEIGHTS):
        _load(b, register, offset(b, weights, i * TILE_BYTES), row)
    with cgutils.for_range(b, count) as loop:
        place = b.add(sums, b.mul(loop.index, const(TILE_BYTES)))
        along = b.add(values, b.mul(loop.index, const(2 * TILE_BYTES)))
        with b.if_else(add) as (more, new):
            with more:
                _load(b, SUMS[0], place, row)
            with new:
                _of_tiles(b, "zero", SUMS[0])
        for i, (register, weight) in enumerate(zip(X, WEIGHTS, strict=True)):
            _load(b, register, offset(b, along, i * TILE_BYTES), row)
            _of_tiles(b, "dpbf16ps", SUMS[0], register, weight)
        _store(b, SUMS[0], place, row)


@instruction(types.void, JOB, types.int64, types.int64, types.int64)
def set_shape(builder: Any, job: Any, memory: Any, first: Any, second: Any) -> None:
    """Of the registers: 64 bytes a row, and so many rows in the first and second tile of x."""
    if not job[2]:
        return
    for register in range(8):
        rows = const(TILE_ROWS)
        if register in (*SUMS[:2], X[0]):
            rows = first
        elif register in (*SUMS[2:], X[1]):
            rows = second
        row_bytes = pointer(builder, offset(builder, memory, 16 + 2 * register), I16)
        builder.store(const(LINE_BYTES, I16), row_bytes)
        place = pointer(builder, offset(builder, memory, 48 + register), I8)
        builder.store(builder.trunc(rows, I8), place)
    call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), pointer(builder, memory, I8))


@instruction(types.void, JOB)
def release(builder: Any, job: Any) -> None:
    """The registers are not to be kept for this thread any longer."""
    if job[2]:
        call(builder, "llvm.x86.tilerelease", ir.VoidType())


@instruction(types.int64)
def shape_memory(builder: Any) -> Any:
    memory = ir.ArrayType(I8, 64)
    first = [1] + [0] * 63  # the palette
    place = cgutils.alloca_once(builder, memory)
    builder.store(ir.Constant(memory, first), place)
    return builder.ptrtoint(place, I64)
