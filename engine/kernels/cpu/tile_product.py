"""x @ weight.T + bias on a CPU with AMX.

A panel holds 32 columns' weights in tiles as the instruction takes them, [inputs / 32][2 tiles]
[16 pairs][16 columns][2]. So weights are one stream through memory. Where there are more than 32
rows, a part of 32 at a time stays in the first cache level while a few panels pass it, and those
panels stay in the second while all rows pass.

A row's sum is the same to the last bit, whatever rows are computed beside it.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import FLOATS, I64, LANES
from engine.kernels.cpu.language import instruction, part_of_kernel
from engine.kernels.cpu.matrix import (
    LINE_BYTES,
    TILE_BYTES,
    TILE_INPUTS,
    TILE_ROWS,
    fetching_one,
    fetching_two,
    one,
    release,
    set_shape,
    shape_memory,
    two,
)
from engine.kernels.cpu.memory import claim, copy, load_fp32, store, word

COLUMNS, INPUTS, ROWS = 2 * TILE_ROWS, TILE_INPUTS, 2 * TILE_ROWS  # of four tiles of sums
BLOCK_BYTES = 2 * TILE_BYTES  # of a panel or of rows laid out, for as many inputs
PART_BLOCKS = 16  # of 32 rows: 32 kB
MOST_TOGETHER = 8  # panels in one claim
PANEL_BYTES = COLUMNS * ROWS * 4  # of sums
SUMS_ROW = COLUMNS * 4
LAY_WORDS = "5q"
LAID = LINE_BYTES, BLOCK_BYTES  # from row to row, and from step to step
PANEL = LINE_BYTES, BLOCK_BYTES, TILE_BYTES


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
    panels = (word(job, 6) + COLUMNS - 1) // COLUMNS if rows > 0 else 0  # no tile has no rows
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
            fetching_two(x, x_row, LINE_BYTES, part, *PANEL, blocks, sums, SUMS_ROW, False)
        else:
            fetching_one(x, x_row, LINE_BYTES, part, *PANEL, blocks, sums, SUMS_ROW, False)
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
                fetching_two(place, *LAID, part, *PANEL, size, target, SUMS_ROW, block > 0)
            elif left > TILE_ROWS:
                two(place, *LAID, part, *PANEL, size, target, SUMS_ROW, block > 0)
            else:
                one(place, *LAID, part, *PANEL, size, target, SUMS_ROW, block > 0)
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


@instruction(types.int64)
def panel_sums(builder: Any) -> Any:
    """Room on the stack for the sums of 32 rows and the panels of one claim."""
    count = MOST_TOGETHER * PANEL_BYTES // (4 * LANES)
    return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(FLOATS, count)), I64)
