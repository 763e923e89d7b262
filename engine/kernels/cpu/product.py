"""x @ weight.T + bias, for weights packed in panels of 64 output columns.

A panel holds its columns' weights step by step, [steps][64], a step being one input (fp32) or
two in a pair (bf16): one stream through memory, which is what decides the time of few rows
(one row: 44 GB/s where oneDNN's own kernel got 36 and a plain read 40), while the register tile
keeps many rows at the speed of the multipliers (905 GF/s where oneDNN got 862).
"""

from typing import Any

import torch
from numba.extending import register_jitable

from engine.kernels.cpu.simd import (
    LANES,
    claim,
    element_bytes,
    load_fp32,
    store,
    word,
)
from engine.kernels.cpu.tile import (
    COLUMNS,
    tile_1x64,
    tile_2x64,
    tile_4x64,
    tile_6x64,
    tile_buffer,
)

WORDS = "10q"
INPUTS_PER_STEP = {torch.float32: 1, torch.bfloat16: 2}
BLOCK_ROWS = 384  # a block of x (768 wide: 600 kB) stays in the second level while panels pass
PANELS_TOGETHER = 2
STEP_BYTES = 4  # of x: one fp32 or a pair of bf16
PANEL_STEP_BYTES = STEP_BYTES * COLUMNS


def product(job: Any) -> None:
    """Pieces are panels, all of them for one block of rows after the other."""
    x, x_row = word(job, 0), word(job, 1)
    weight, steps = word(job, 2), word(job, 3)
    bias = word(job, 4)  # [columns] fp32, or 0
    out, columns = word(job, 5), word(job, 6)
    rows, block = word(job, 7), word(job, 8)
    together = word(job, 9)  # panels in one claim
    panels = (columns + COLUMNS - 1) // COLUMNS
    pieces = (rows + block - 1) // block * panels
    result = tile_buffer()
    while True:
        first = claim(job, together)
        if first >= pieces:
            return
        for piece in range(first, min(first + together, pieces)):
            panel = piece % panels
            row, end = piece // panels * block, min((piece // panels + 1) * block, rows)
            panel_weight = weight + panel * steps * PANEL_STEP_BYTES
            start = panel * COLUMNS
            while row < end:
                count = tile(job, x + row * x_row, x_row, panel_weight, steps, end - row, result)
                for r in range(count):
                    place = out + ((row + r) * columns + start) * element_bytes(job)
                    finish(job, result + r * COLUMNS * 4, bias, start, columns - start, place)
                row += count


@register_jitable
def tile(job: Any, x: Any, x_row: Any, weight: Any, steps: Any, rows: Any, result: Any) -> Any:
    """The largest tile that `rows` fill; gives its number of rows."""
    row_bytes = COLUMNS * 4
    if rows >= 6:
        tile_6x64(job, x, x_row, STEP_BYTES, weight, 256, steps, result, row_bytes, False)
        return 6
    if rows >= 4:
        tile_4x64(job, x, x_row, STEP_BYTES, weight, 256, steps, result, row_bytes, False)
        return 4
    if rows >= 2:
        tile_2x64(job, x, x_row, STEP_BYTES, weight, 256, steps, result, row_bytes, False)
        return 2
    tile_1x64(job, x, x_row, STEP_BYTES, weight, 256, steps, result, row_bytes, False)
    return 1


@register_jitable
def finish(job: Any, result: Any, bias: Any, start: Any, columns: Any, place: Any) -> None:
    """A row of the tile, plus bias, to its place in the output."""
    for column in range(0, min(columns, COLUMNS), LANES):
        value = load_fp32(result + column * 4, LANES)
        if bias != 0:
            value = value + load_fp32(bias + (start + column) * 4, LANES)
        store(job, place + column * element_bytes(job), value, columns - column)
