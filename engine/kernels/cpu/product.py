"""x @ weight.T + bias, for weights packed in panels of 64 output columns.

A panel holds its columns' weights step by step, [steps][64], a step being one input (fp32) or
two in a pair (bf16). So weights are one stream through memory, which is what decides the time
of few rows, while the register tile keeps many rows at the speed of the multipliers.

A part of a panel stays in the second cache level while all rows pass it six at a time, and the
first passes fetch the part that comes next, so that reading and computing overlap.
"""

from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import FLOATS, I64, LANES
from engine.kernels.cpu.language import instruction, part_of_kernel
from engine.kernels.cpu.memory import claim, element_bytes, load_fp32, store, word
from engine.kernels.cpu.tile import (
    COLUMNS,
    fetching_4x64,
    fetching_6x64,
    fetching_twice_4x64,
    fetching_twice_6x64,
    tile_1x64,
    tile_2x64,
    tile_4x64,
    tile_6x64,
)

WORDS = "9q"
INPUTS_PER_STEP = {torch.float32: 1, torch.bfloat16: 2}
STEP_BYTES = 4  # of x: one fp32 or a pair of bf16
PANEL_STEP_BYTES = STEP_BYTES * COLUMNS
PART_STEPS = 384  # of a panel, 96 kB, beside as many steps of the block's rows
BLOCK_ROWS = 384
FEW_ROWS = 6  # that pass a panel together, as it comes
TWO_PASSES = 12  # rows
SUMS_ROW = COLUMNS * 4


def product(job: Any) -> None:
    """Pieces are panels, all of them for one block of rows after the other."""
    steps, columns = word(job, 3), word(job, 6)
    rows, together = word(job, 7), word(job, 8)  # `together`: panels in one claim
    part_steps = PART_STEPS if rows > FEW_ROWS else steps
    panels = (columns + COLUMNS - 1) // COLUMNS
    pieces = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS * panels
    sums = block_sums()
    while True:
        first = claim(job, together)
        if first >= pieces:
            return
        last = min(first + together, pieces) - 1
        for piece in range(first, last + 1):
            row = piece // panels * BLOCK_ROWS
            count = min(rows - row, BLOCK_ROWS)
            panel = piece % panels
            for step in range(0, steps, part_steps):
                next_comes = piece < last or step + part_steps < steps
                multiply(job, panel, step, part_steps, row, count, sums, next_comes)
            for r in range(count):
                finish(job, sums + r * SUMS_ROW, row + r, panel * COLUMNS)


@part_of_kernel
def multiply(
    job: Any,
    panel: Any,
    step: Any,
    part_steps: Any,
    row: Any,
    rows: Any,
    sums: Any,
    next_comes: Any,
) -> None:
    """Adds the products of a part of a panel with a block of rows to their sums."""
    x_row, steps = word(job, 1), word(job, 3)
    x = word(job, 0) + row * x_row + step * STEP_BYTES
    count = min(steps - step, part_steps)
    part = word(job, 2) + (panel * steps + step) * PANEL_STEP_BYTES
    ahead = part + count * PANEL_STEP_BYTES
    # A step has four lines; so that many passes fetch all of the part that comes next.
    passes = 2 if rows <= TWO_PASSES else 4
    if not next_comes or rows <= FEW_ROWS:
        passes = 0
    done, turn = 0, 0
    while done < rows:
        place, target = x + done * x_row, sums + done * SUMS_ROW
        left = rows - done
        if turn < passes and left >= 4:
            later = ahead + turn * count * PANEL_STEP_BYTES // passes
            done += fetching_tile(
                job, place, x_row, part, count, target, step > 0, left, later, passes
            )
        else:
            done += tile(job, place, x_row, part, count, target, step > 0, left)
        turn += 1


@part_of_kernel
def tile(
    job: Any, x: Any, x_row: Any, part: Any, steps: Any, sums: Any, add: Any, rows: Any
) -> Any:
    """The best tile for what is left of the rows; gives how many it has done."""
    if rows >= 6 and rows != 8:
        tile_6x64(job, x, x_row, 4, part, PANEL_STEP_BYTES, steps, sums, SUMS_ROW, add, 0)
        return 6
    if rows >= 4:
        tile_4x64(job, x, x_row, 4, part, PANEL_STEP_BYTES, steps, sums, SUMS_ROW, add, 0)
        return 4
    if rows >= 2:
        tile_2x64(job, x, x_row, 4, part, PANEL_STEP_BYTES, steps, sums, SUMS_ROW, add, 0)
        return 2
    tile_1x64(job, x, x_row, 4, part, PANEL_STEP_BYTES, steps, sums, SUMS_ROW, add, 0)
    return 1


@part_of_kernel
def fetching_tile(
    job: Any,
    x: Any,
    x_row: Any,
    part: Any,
    steps: Any,
    sums: Any,
    add: Any,
    rows: Any,
    ahead: Any,
    passes: Any,
) -> Any:
    size = PANEL_STEP_BYTES
    if rows >= 6 and rows != 8:
        if passes == 2:
            fetching_twice_6x64(job, x, x_row, 4, part, size, steps, sums, SUMS_ROW, add, ahead)
        else:
            fetching_6x64(job, x, x_row, 4, part, size, steps, sums, SUMS_ROW, add, ahead)
        return 6
    if passes == 2:
        fetching_twice_4x64(job, x, x_row, 4, part, size, steps, sums, SUMS_ROW, add, ahead)
    else:
        fetching_4x64(job, x, x_row, 4, part, size, steps, sums, SUMS_ROW, add, ahead)
    return 4


@part_of_kernel
def finish(job: Any, sums: Any, row: Any, start: Any) -> None:
    """A row's sums, plus bias, to its place in the output."""
    bias, columns = word(job, 4), word(job, 6)  # [columns] fp32, or 0
    place = word(job, 5) + (row * columns + start) * element_bytes(job)
    count = min(columns - start, COLUMNS)
    for column in range(0, count, LANES):
        value = load_fp32(sums + column * 4, LANES)
        if bias != 0:
            value = value + load_fp32(bias + (start + column) * 4, LANES)
        store(job, place + column * element_bytes(job), value, count - column)


@instruction(types.int64)
def block_sums(builder: Any) -> Any:
    """Room on the stack for the sums of a block of rows, 96 kB."""
    place = cgutils.alloca_once(builder, ir.ArrayType(FLOATS, BLOCK_ROWS * COLUMNS // LANES))
    return builder.ptrtoint(place, I64)
