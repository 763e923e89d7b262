"""x @ weight.T + bias, for weights packed in panels of 64 output columns.

A panel holds its columns' weights step by step, [steps][64], a step being one input, or two in a
pair where the CPU multiplies pairs of bf16. So weights are one stream through memory, which is
what decides the time of few rows, while the register tile keeps many rows at the speed of the
multipliers. What the CPU cannot multiply is widened to fp32: weights in the tile, or a part of them
before it where many rows pass; rows before it, by `widen_rows` where there are more than a few,
since every panel would do so again.

A part of a panel stays in the first cache level, for many rows in the second, while all rows pass
it six at a time, and up to eight of the passes fetch the part that comes next, so that reading and
computing overlap. Where registers are narrow, six rows read it in four cuts of its columns, and one
pass fetches the next.
Few rows pass once and fetch what lies a little further: left to itself, a Xeon reads weights at
two thirds of the rate.
"""

from typing import Any

from numba.core import types

from engine.kernels.cpu.emit import I1, LANES, LINE_BYTES, const, stack_lines
from engine.kernels.cpu.language import JOB, instruction, part_of_kernel
from engine.kernels.cpu.memory import (
    claim,
    element_bytes,
    is_narrow,
    load,
    load_fp32,
    store,
    store_fp32,
    word,
)
from engine.kernels.cpu.tile import (
    COLUMNS,
    far_6x64,
    made_6x64,
    narrow_1x64,
    narrow_2x32,
    narrow_4x16,
    narrow_6x16,
    tile_1x64,
    tile_2x64,
    tile_4x64,
    tile_6x64,
    widen_panel,
)

WORDS = "9q"
WIDEN_WORDS = "6q"
NUMBER_BYTES = 4  # that the tile broadcasts: one fp32 or a pair of bf16
PART_BYTES = 16 << 10  # of a panel, beside as many steps of six rows
NARROW_PART_BYTES = 24 << 10
AHEAD_BYTES = 8 << 10  # that few rows look ahead
BLOCK_ROWS = 384
TILE_ROWS = 6
FEW_ROWS = 6  # that pass a panel together, as it comes
MANY_ROWS = 64  # for which a part is widened once
MANY_STEPS = 384  # of a part for many rows, 96 kB of what they are multiplied with
MOST_PASSES = 8
SUMS_ROW = COLUMNS * 4
WIDENED = ("bf16", "f16")  # element types
FEW_WIDENED = (NARROW_PART_BYTES // (2 * COLUMNS) + LANES) * NUMBER_BYTES  # from row to row, of few


def widen_rows(job: Any) -> None:
    """Rows for a product of more than FEW_ROWS, as fp32. Pieces are rows."""
    x, x_row, count, rows = word(job, 0), word(job, 1), word(job, 2), word(job, 3)
    out, out_row = word(job, 4), word(job, 5)
    while True:
        row = claim(job, 1)
        if row >= rows:
            return
        widen(job, x + row * x_row, count, out + row * out_row)


def product(job: Any) -> None:
    """Pieces are panels, all of them for one block of rows after the other."""
    steps, columns = word(job, 3), word(job, 6)
    rows, together = word(job, 7), word(job, 8)  # `together`: panels in one claim
    part_steps, wide_part = steps, 0
    if rows >= MANY_ROWS and not is_narrow(job):
        part_steps, wide_part = MANY_STEPS, widened_part() if widens(job) else 0
    elif rows > FEW_ROWS or widens(job) or is_narrow(job):
        part_steps = (NARROW_PART_BYTES if is_narrow(job) else PART_BYTES) // panel_step_bytes(job)
    panels = (columns + COLUMNS - 1) // COLUMNS
    pieces = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS * panels
    sums, numbers = block_sums(), tile_numbers()
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
                wide = wide_part if count >= MANY_ROWS else 0
                multiply(job, panel, step, part_steps, row, count, sums, numbers, wide, next_comes)
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
    numbers: Any,
    wide: Any,
    next_comes: Any,
) -> None:
    """Adds the products of a part of a panel with a block of rows to their sums; `wide`: where that
    part is to be widened once, or 0."""
    x_row, steps, step_bytes = word(job, 1), word(job, 3), panel_step_bytes(job)
    widens_few = widens(job) and word(job, 7) <= FEW_ROWS
    number_bytes = element_bytes(job) if widens_few else NUMBER_BYTES
    x = word(job, 0) + row * x_row + step * number_bytes
    count = min(steps - step, part_steps)
    part = word(job, 2) + (panel * steps + step) * step_bytes
    ahead, fetched, passes = part + count * step_bytes, step_bytes, 1
    if not is_narrow(job) and rows <= FEW_ROWS:
        ahead, next_comes = part + AHEAD_BYTES, True
    elif not is_narrow(job):
        # So many passes fetch all of the part that comes next, so much of it in each step.
        passes = min(max(2, (rows + 2) // TILE_ROWS), MOST_PASSES)
        fetched = (step_bytes + passes - 1) // passes
    if wide != 0:
        widen_panel(job, part, step_bytes, count, wide)
    done, turn = 0, 0
    while done < rows:
        place, target = x + done * x_row, sums + done * SUMS_ROW
        left = rows - done
        place_row = x_row
        if widens_few:
            for i in range(left):
                widen(job, place + i * x_row, count, numbers + i * FEW_WIDENED)
            place, place_row = numbers, FEW_WIDENED
        later, distance = part, 0  # which is there: asking costs nothing
        if next_comes and turn < passes:
            later, distance = ahead + turn * count * fetched, fetched
        if wide != 0 and left >= TILE_ROWS:
            wide_tile(job, place, place_row, wide, count, target, step > 0, later, distance)
            done += TILE_ROWS
        else:
            done += tile(
                job, place, place_row, part, count, target, step > 0, left, later, distance
            )
        turn += 1


@part_of_kernel
def widen(job: Any, x: Any, count: Any, out: Any) -> None:
    """So many elements of a row to fp32, and zeros to the next sixteen."""
    for i in range(0, count, LANES):
        value = load(job, x + i * element_bytes(job), count - i)
        store_fp32(out + i * NUMBER_BYTES, value, LANES)


@part_of_kernel
def tile(
    job: Any,
    x: Any,
    x_row: Any,
    part: Any,
    steps: Any,
    sums: Any,
    add: Any,
    rows: Any,
    ahead: Any,
    fetched: Any,
) -> Any:
    """The best tile for what is left of the rows; gives how many it has done."""
    size, step = panel_step_bytes(job), NUMBER_BYTES
    if is_narrow(job):
        return narrow_tile(job, x, x_row, part, size, steps, sums, add, rows, ahead, fetched)
    if rows >= 6 and rows != 8 and word(job, 7) >= MANY_ROWS:
        far_6x64(job, x, x_row, step, part, size, steps, sums, SUMS_ROW, add, ahead, fetched)
        return 6
    if rows >= 6 and rows != 8:
        tile_6x64(job, x, x_row, step, part, size, steps, sums, SUMS_ROW, add, ahead, fetched)
        return 6
    if rows >= 4:
        tile_4x64(job, x, x_row, step, part, size, steps, sums, SUMS_ROW, add, ahead, fetched)
        return 4
    if rows >= 2:
        tile_2x64(job, x, x_row, step, part, size, steps, sums, SUMS_ROW, add, ahead, fetched)
        return 2
    tile_1x64(job, x, x_row, step, part, size, steps, sums, SUMS_ROW, add, ahead, fetched)
    return 1


@part_of_kernel
def wide_tile(
    job: Any,
    x: Any,
    x_row: Any,
    part: Any,
    steps: Any,
    sums: Any,
    add: Any,
    ahead: Any,
    fetched: Any,
) -> None:
    """TILE_ROWS and a part that was widened."""
    step, row = NUMBER_BYTES, SUMS_ROW
    made_6x64(job, x, x_row, step, part, row, steps, sums, row, add, ahead, fetched)


@part_of_kernel
def narrow_tile(
    job: Any,
    x: Any,
    x_row: Any,
    part: Any,
    size: Any,
    steps: Any,
    sums: Any,
    add: Any,
    rows: Any,
    ahead: Any,
    fetched: Any,
) -> Any:
    """Of sixteen registers twelve hold sums at most: columns come in as many cuts as it takes."""
    done = 6 if rows >= 6 and rows != 8 else 4 if rows >= 4 else min(rows, 2)
    cuts, step, sums_row = min(done, 4), NUMBER_BYTES, SUMS_ROW
    far = fetched // cuts
    for i in range(cuts):
        right, to, later = part + i * size // cuts, sums + i * sums_row // cuts, ahead
        if done == 6:
            narrow_6x16(job, x, x_row, step, right, size, steps, to, sums_row, add, later, far)
        elif done == 4:
            narrow_4x16(job, x, x_row, step, right, size, steps, to, sums_row, add, later, far)
        elif done == 2:
            narrow_2x32(job, x, x_row, step, right, size, steps, to, sums_row, add, later, far)
        else:
            narrow_1x64(job, x, x_row, step, right, size, steps, to, sums_row, add, later, far)
        ahead += steps * far
    return done


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
    return stack_lines(builder, BLOCK_ROWS * COLUMNS // LANES)


@instruction(types.int64)
def widened_part(builder: Any) -> Any:
    """Room on the stack for a part of a panel as fp32, 96 kB."""
    return stack_lines(builder, MANY_STEPS * COLUMNS // LANES)


@instruction(types.int64)
def tile_numbers(builder: Any) -> Any:
    """Room on the stack for few widened rows, 5 kB."""
    return stack_lines(builder, FEW_ROWS * FEW_WIDENED // LINE_BYTES)


@instruction(types.boolean, JOB)
def widens(builder: Any, job: Any) -> Any:
    """Whether elements are multiplied as fp32 that are not; as constant."""
    return const(int(job[1] in WIDENED), I1)


@instruction(types.int64, JOB)
def panel_step_bytes(builder: Any, job: Any) -> Any:
    return const(COLUMNS * (2 if job[1] in WIDENED else NUMBER_BYTES))
