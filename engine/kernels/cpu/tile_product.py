"""x @ weight.T + bias on a CPU with AMX.

A panel holds 32 columns' weights in tiles as the instruction takes them, [inputs / 32][2 tiles]
[16 pairs][16 columns][2]. So weights are one stream through memory. Where there are more than 32
rows, they go 32 at a time past the panels of a claim, which stay in the second cache level, while
those of the next claim are fetched into it, a share in each pass. A part of 32 rows stays in the
first level, beside the sums, while a few panels pass it.

A row's sum is the same to the last bit, whatever rows are computed beside it.
"""

from typing import Any

from numba.core import types

from engine.kernels.cpu.emit import LANES, LINE_BYTES, PAIRS, call, stack_lines, store_to
from engine.kernels.cpu.language import floats, instruction, part_of_kernel
from engine.kernels.cpu.matrix import (
    TILE_BYTES,
    TILE_INPUTS,
    TILE_ROWS,
    one,
    release,
    set_shape,
    shape_memory,
    two,
)
from engine.kernels.cpu.memory import claim, load_fp32, store, word

COLUMNS, INPUTS, ROWS = 2 * TILE_ROWS, TILE_INPUTS, 2 * TILE_ROWS  # of four tiles of sums
BLOCK_BYTES = 2 * TILE_BYTES  # of a panel, for as many inputs
BLOCK_LINES = BLOCK_BYTES // LINE_BYTES
PART_BLOCKS = 8  # of 32 rows: 16 kB
BESIDE = 2  # panels that pass a part: 8 kB of sums
# Panels in one claim, by the number of rows: those of few rows are one stream, and those of very
# many read the rows themselves from further away.
TOGETHER_BY_ROWS = (ROWS, 8), (512, 2), (1 << 62, 4)
TOGETHER_BYTES = 1 << 20  # of them, which stay in the second cache level
AHEAD_BYTES = 16 << 10  # that what nobody has fetched is asked for
PANEL_BYTES = COLUMNS * ROWS * 4  # of sums
SUMS_ROW = COLUMNS * 4
PANEL = LINE_BYTES, BLOCK_BYTES, TILE_BYTES  # from row to row, step to step, and tile to tile


def tiles_together(rows: int, panel_bytes: int) -> int:
    """Panels in one claim, at most. Many rows take so long with each that a thread which has none
    left would wait long for those that another has claimed, and has claimed ahead."""
    most = next(panels for most_rows, panels in TOGETHER_BY_ROWS if rows <= most_rows)
    return max(1, min(most, TOGETHER_BYTES // panel_bytes))


def tile_product(job: Any) -> None:
    """Pieces are panels."""
    rows, together = word(job, 7), word(job, 8)  # `together`: panels in one claim
    panels = (word(job, 6) + COLUMNS - 1) // COLUMNS if rows > 0 else 0  # no tile has no rows
    sums, shape = panel_sums(), shape_memory()
    first, fetched = claim(job, together), False
    while first < panels:
        end = min(first + together, panels)
        if rows <= ROWS:
            few(job, first, end, sums, shape)
            first = claim(job, together)
        else:
            following = claim(job, together)  # so early, to fetch its panels meanwhile
            many(job, first, end, fetched, following, sums, shape)
            first, fetched = following, True
    release(job)


@part_of_kernel
def few(job: Any, first: Any, end: Any, sums: Any, shape: Any) -> None:
    x, x_row, weights = word(job, 0), word(job, 1), word(job, 2)
    blocks, rows = word(job, 3), word(job, 7)
    set_rows(job, shape, rows)
    place = x, x_row, LINE_BYTES
    for panel in range(first, end):
        part = weights + panel * blocks * BLOCK_BYTES
        ahead = part + AHEAD_BYTES
        if rows > TILE_ROWS:
            two(job, *place, part, *PANEL, blocks, sums, SUMS_ROW, False, ahead, BLOCK_LINES)
        else:
            one(job, *place, part, *PANEL, blocks, sums, SUMS_ROW, False, ahead, BLOCK_LINES)
        finish(job, sums, 0, rows, panel, 1)


@part_of_kernel
def many(
    job: Any, first: Any, end: Any, fetched: Any, following: Any, sums: Any, shape: Any
) -> None:
    """All rows; `fetched` says whether these panels were, `following` are to be."""
    weights, rows = word(job, 2), word(job, 7)
    panel_bytes = word(job, 3) * BLOCK_BYTES
    passes = (rows + ROWS - 1) // ROWS
    share = (BLOCK_LINES + passes - 1) // passes  # of a block's lines in each pass
    for row in range(0, rows, ROWS):
        done = row // ROWS * share
        lines = share if done < BLOCK_LINES else 0
        ahead = weights + following * panel_bytes
        ahead += (end - first) * (panel_bytes // BLOCK_LINES) * done
        if row == 0 and not fetched:
            lines, ahead = BLOCK_LINES, weights + first * panel_bytes + AHEAD_BYTES
        elif following * COLUMNS >= word(job, 6):
            lines = 0
        left = min(rows - row, ROWS)
        if row == 0 or left < ROWS:
            set_rows(job, shape, left)
        for panel in range(first, end, BESIDE):
            beside(job, row, left, panel, min(end - panel, BESIDE), sums, ahead, lines)
            ahead += BESIDE * (panel_bytes // BLOCK_LINES) * lines


@part_of_kernel
def beside(
    job: Any, row: Any, rows: Any, first: Any, count: Any, sums: Any, ahead: Any, lines: Any
) -> None:
    """32 rows and a few panels."""
    blocks, weights, x_row = word(job, 3), word(job, 2), word(job, 1)
    x = word(job, 0) + row * x_row
    for block in range(0, blocks, PART_BLOCKS):
        size = min(blocks - block, PART_BLOCKS)
        place = x + block * LINE_BYTES, x_row, LINE_BYTES
        for i in range(count):
            part = weights + ((first + i) * blocks + block) * BLOCK_BYTES
            target = sums + i * PANEL_BYTES
            add = block > 0
            if rows > TILE_ROWS:
                two(job, *place, part, *PANEL, size, target, SUMS_ROW, add, ahead, lines)
            else:
                one(job, *place, part, *PANEL, size, target, SUMS_ROW, add, ahead, lines)
            ahead += size * lines * LINE_BYTES
    finish(job, sums, row, rows, first, count)


@part_of_kernel
def set_rows(job: Any, shape: Any, rows: Any) -> None:
    set_shape(job, shape, min(rows, TILE_ROWS), min(max(rows - TILE_ROWS, 1), TILE_ROWS))


@part_of_kernel
def finish(job: Any, sums: Any, row: Any, rows: Any, first: Any, panels: Any) -> None:
    """Sums of some panels, plus bias, to their place in the output; row by row, as every row's
    is in another page of memory."""
    bias, columns, start = word(job, 4), word(job, 6), first * COLUMNS
    place = word(job, 5) + (row * columns + start) * 2
    whole = min(panels, (columns - start) // COLUMNS)
    rest = columns - start - whole * COLUMNS if whole < panels else 0
    for line in range(sums, sums + rows * SUMS_ROW, SUMS_ROW):
        for i in range(whole):
            x, y = finished(line + i * PANEL_BYTES, bias, start + i * COLUMNS)
            store_both(place + i * COLUMNS * 2, x, y)
        if rest > 0:
            x, y = finished(line + whole * PANEL_BYTES, bias, start + whole * COLUMNS)
            store(job, place + whole * COLUMNS * 2, x, rest)
            if rest > LANES:
                store(job, place + (whole * COLUMNS + LANES) * 2, y, rest - LANES)
        place += columns * 2


@part_of_kernel
def finished(line: Any, bias: Any, column: Any) -> Any:
    x, y = load_fp32(line, LANES), load_fp32(line + LINE_BYTES, LANES)
    if bias != 0:  # [columns] fp32
        x = x + load_fp32(bias + column * 4, LANES)
        y = y + load_fp32(bias + column * 4 + LINE_BYTES, LANES)
    return x, y


@instruction(types.void, types.int64, floats, floats)
def store_both(b: Any, address: Any, x: Any, y: Any) -> None:
    """Thirty-two columns of a row, rounded to bf16."""
    both = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, y, x)
    store_to(b, both, address, 2)


@instruction(types.int64)
def panel_sums(builder: Any) -> Any:
    """Room on the stack for the sums of 32 rows and a few panels."""
    return stack_lines(builder, BESIDE * PANEL_BYTES // LINE_BYTES)
