"""x @ weight.T + bias on a CPU with AMX: `tdpbf16ps` adds the products of 16 rows, 32 inputs and
16 columns at once.

A panel holds 32 columns' weights in tiles as the instruction takes them, [inputs / 32][2 tiles]
[16 pairs][16 columns][2]. Two of them and two tiles of x make four tiles of sums, which are all
eight registers. So weights are one stream through memory. Where there are more than 32 rows, a
part of 32 at a time stays in the first cache level while a few panels pass it, and those panels
stay in the second while all rows pass.

A row's sum is the same to the last bit, whatever rows are computed beside it.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import (
    FLOATS,
    I16,
    I64,
    LANES,
    call,
    const,
    offset,
    pointer,
    prefetch_line,
)
from engine.kernels.cpu.language import instruction, part_of_kernel
from engine.kernels.cpu.memory import claim, copy, load_fp32, store, word

COLUMNS, INPUTS, ROWS = 32, 32, 32  # of four tiles of sums
TILE_ROWS, TILE_BYTES, LINE_BYTES = 16, 1024, 64
BLOCK_BYTES = 2 * TILE_BYTES  # of a panel or of rows laid out, for as many inputs
PART_BLOCKS = 16  # of 32 rows: 32 kB
MOST_TOGETHER = 8  # panels in one claim
PANEL_BYTES = COLUMNS * ROWS * 4  # of sums
SUMS_ROW = COLUMNS * 4
AHEAD_BYTES = 16 << 10
SUMS, X, WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # registers
LAY_WORDS = "5q"


def lay_rows(job: Any) -> None:
    """Rows for a product of more than 32, [rows / 32][inputs / 32][2 tiles][16][32], so that 32
    of them are together in the first cache level. Pieces are 16 rows."""
    x, x_row, out = word(job, 0), word(job, 1), word(job, 4)
    blocks, rows = word(job, 2), word(job, 3)
    while True:
        tile = claim(job, 1)
        if tile * TILE_ROWS >= rows:
            return
        target = out + (tile // 2 * blocks * 2 + tile % 2) * TILE_BYTES
        for row in range(tile * TILE_ROWS, min(tile * TILE_ROWS + TILE_ROWS, rows)):
            place = target + row % TILE_ROWS * LINE_BYTES
            for block in range(blocks):
                copy(place + block * BLOCK_BYTES, x + row * x_row + block * LINE_BYTES, LINE_BYTES)


def tile_product(job: Any) -> None:
    """Pieces are panels. More than 32 rows are laid out by `lay_rows`."""
    rows, together = word(job, 7), word(job, 8)  # `together`: panels in one claim
    panels = (word(job, 6) + COLUMNS - 1) // COLUMNS
    sums, shape = panel_sums(), shape_memory()
    while True:
        first = claim(job, together)
        if first >= panels:
            break
        count = min(together, panels - first)
        if rows <= ROWS:
            few(job, first, count, sums, shape)
        else:
            for row in range(0, rows, ROWS):
                many(job, first, count, row, sums, shape)
    release()


@part_of_kernel
def few(job: Any, first: Any, count: Any, sums: Any, shape: Any) -> None:
    x, x_row, weights = word(job, 0), word(job, 1), word(job, 2)
    blocks, rows = word(job, 3), word(job, 7)
    set_rows(shape, rows)
    for panel in range(first, first + count):
        part = weights + panel * blocks * BLOCK_BYTES
        if rows > TILE_ROWS:
            fetching_two(x, x_row, LINE_BYTES, part, blocks, sums, False)
        else:
            fetching_one(x, x_row, LINE_BYTES, part, blocks, sums, False)
        finish(job, sums, 0, rows, panel, 1)


@part_of_kernel
def many(job: Any, first: Any, count: Any, row: Any, sums: Any, shape: Any) -> None:
    blocks, rows = word(job, 3), word(job, 7)
    x, weights = word(job, 0) + row // ROWS * blocks * BLOCK_BYTES, word(job, 2)
    left = min(rows - row, ROWS)
    set_rows(shape, left)
    for block in range(0, blocks, PART_BLOCKS):
        size = min(blocks - block, PART_BLOCKS)
        place = x + block * BLOCK_BYTES
        for i in range(count):
            part = weights + ((first + i) * blocks + block) * BLOCK_BYTES
            target = sums + i * PANEL_BYTES
            if row == 0:  # later ones find the panels in the second cache level
                fetching_two(place, LINE_BYTES, BLOCK_BYTES, part, size, target, block > 0)
            elif left > TILE_ROWS:
                two(place, LINE_BYTES, BLOCK_BYTES, part, size, target, block > 0)
            else:
                one(place, LINE_BYTES, BLOCK_BYTES, part, size, target, block > 0)
    finish(job, sums, row, left, first, count)


@part_of_kernel
def set_rows(shape: Any, rows: Any) -> None:
    set_shape(shape, min(rows, TILE_ROWS), min(max(rows - TILE_ROWS, 1), TILE_ROWS))


@part_of_kernel
def finish(job: Any, sums: Any, row: Any, rows: Any, first: Any, panels: Any) -> None:
    """Sums of some panels, plus bias, to their place in the output."""
    bias, columns, start = word(job, 4), word(job, 6), first * COLUMNS
    whole = min(columns - start, panels * COLUMNS) // LANES
    rest = min(columns - start - whole * LANES, LANES) * (whole < panels * COLUMNS // LANES)
    for r in range(rows):
        place = word(job, 5) + ((row + r) * columns + start) * 2
        for i in range(whole):
            value = finished(sums, r, i, bias, start)
            store(job, place + i * LANES * 2, value, LANES)
        if rest > 0:
            store(job, place + whole * LANES * 2, finished(sums, r, whole, bias, start), rest)


@part_of_kernel
def finished(sums: Any, row: Any, vector: Any, bias: Any, start: Any) -> Any:
    panel, half = vector // 2, vector % 2
    value = load_fp32(sums + panel * PANEL_BYTES + row * SUMS_ROW + half * LINE_BYTES, LANES)
    if bias != 0:  # [columns] fp32
        value = value + load_fp32(bias + (start + vector * LANES) * 4, LANES)
    return value


def _tiles(num_x: int, fetches: bool) -> Any:
    """So many tiles of rows with the two tiles of columns of each block of a panel."""

    def write(
        b: Any, x: Any, x_row: Any, x_step: Any, part: Any, blocks: Any, sums: Any, add: Any
    ) -> None:
        x_tile = b.mul(x_row, const(TILE_ROWS))
        places = [
            (SUMS[2 * r + c], offset(b, sums, r * TILE_ROWS * SUMS_ROW + c * LINE_BYTES))
            for r in range(num_x)
            for c in range(2)
        ]
        with b.if_else(add) as (more, new):
            with more:
                for register, place in places:
                    _load(b, register, place, const(SUMS_ROW))
            with new:
                for register, _ in places:
                    _of_tiles(b, "zero", register)
        with cgutils.for_range(b, blocks) as loop:
            block = b.add(part, b.mul(loop.index, const(BLOCK_BYTES)))
            along = b.add(x, b.mul(loop.index, x_step))
            for line in range(0, BLOCK_BYTES if fetches else 0, LINE_BYTES):
                prefetch_line(b, offset(b, block, AHEAD_BYTES + line))
            for c in range(2):
                _load(b, WEIGHTS[c], offset(b, block, c * TILE_BYTES), const(LINE_BYTES))
            for r in range(num_x):
                _load(b, X[r], b.add(along, x_tile) if r else along, x_row)
                for c in range(2):
                    _of_tiles(b, "dpbf16ps", SUMS[2 * r + c], X[r], WEIGHTS[c])
        for register, place in places:
            _store(b, register, place, const(SUMS_ROW))

    i = types.int64
    return instruction(types.void, i, i, i, i, i, i, types.boolean)(write)


I8 = ir.IntType(8)


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


one, two = (_tiles(num, fetches=False) for num in (1, 2))
fetching_one, fetching_two = (_tiles(num, fetches=True) for num in (1, 2))


@instruction(types.void, types.int64, types.int64, types.int64)
def set_shape(builder: Any, memory: Any, first: Any, second: Any) -> Any:
    """Of the registers: 64 bytes a row, and so many rows in the first and second tile of x."""
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


@instruction(types.void)
def release(builder: Any) -> Any:
    """The registers are not to be kept for this thread any longer."""
    call(builder, "llvm.x86.tilerelease", ir.VoidType())


@instruction(types.int64)
def shape_memory(builder: Any) -> Any:
    memory = ir.ArrayType(I8, 64)
    first = [1] + [0] * 63  # the palette
    place = cgutils.alloca_once(builder, memory)
    builder.store(ir.Constant(memory, first), place)
    return builder.ptrtoint(place, I64)


@instruction(types.int64)
def panel_sums(builder: Any) -> Any:
    """Room on the stack for the sums of 32 rows and the panels of one claim."""
    count = MOST_TOGETHER * PANEL_BYTES // (4 * LANES)
    return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(FLOATS, count)), I64)
