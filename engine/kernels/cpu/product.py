"""x @ weight.T + bias, for weights packed in panels of 64 output columns.

A panel holds its columns' weights step by step, [steps][64], a step being one input, or two in a
pair where the CPU multiplies pairs of bf16. So weights are one stream through memory, which is
what decides the time of few rows, while the register tile keeps many rows at the speed of the
multipliers. What the CPU cannot multiply is made for it in the tile: weights are widened to fp32,
or put together from twelve bits (`short.py`); where many rows pass, the first four keep a part as
they have made it. Rows are widened before, by `widen_rows` where there are more than a few, since
every panel would do so again.

A part of a panel stays in the first cache level, for many rows in the second, while all rows pass
it six at a time, and up to eight of the passes fetch the part that comes next, so that reading and
computing overlap. Few rows pass once and fetch what lies a little further: left to itself, a Xeon
reads weights at two thirds of the rate.

Where registers are narrow, six rows read a part in four cuts of its columns. Twelve bits are put
together before, a part at a time, but for a row that is alone; and few rows fetch the next part.
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
    prefetch,
    store,
    store_fp32,
    word,
)
from engine.kernels.cpu.short import COLUMNS, IDS_WORD, is_short, make_words, short_bytes
from engine.kernels.cpu.tile import (
    KEPT,
    far_6x64,
    keeping_4x64,
    made_6x64,
    narrow_1x64,
    narrow_2x32,
    narrow_4x16,
    narrow_6x16,
    row_words,
    short_1x64,
    tile_1x64,
    tile_2x64,
    tile_4x64,
    tile_6x64,
)

WORDS = "9q"
WIDEN_WORDS = "6q"
SUMS_ROW = MADE_STEP_BYTES = COLUMNS * 4
NUMBER_BYTES = 4  # that the tile broadcasts: one fp32 or a pair of bf16
PART_BYTES = 16 << 10  # of a panel, beside as many steps of six rows
SHORT_PART_BYTES = 12 << 10  # of weights in twelve bits, as many steps
NARROW_PART_BYTES = 24 << 10
AHEAD_BYTES = 8 << 10  # that few rows look ahead
BLOCK_ROWS = KEPT // SUMS_ROW
TILE_ROWS, KEEPING_ROWS = 6, 4
FEW_ROWS = 6  # that pass a panel together, as it comes
MANY_ROWS = 64  # for which a part is made once
MANY_STEPS, MANY_SHORT_STEPS = 384, 192  # of a part for many rows: 96 kB of what they multiply
MOST_PASSES = 8
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
    part_steps = steps
    if rows >= MANY_ROWS and not is_narrow(job):
        part_steps = MANY_SHORT_STEPS if has_short_weights(job) else MANY_STEPS
    elif is_narrow(job):
        part_steps = NARROW_PART_BYTES // made_step_bytes(job)
    elif rows > FEW_ROWS and has_short_weights(job):
        part_steps = SHORT_PART_BYTES // panel_step_bytes(job)
    elif rows > FEW_ROWS or widens(job):
        part_steps = PART_BYTES // panel_step_bytes(job)
    panels = (columns + COLUMNS - 1) // COLUMNS
    pieces = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS * panels
    sums, numbers = block_sums(), tile_numbers()
    first = claim(job, together)
    while first < pieces:
        last = min(first + together, pieces) - 1
        for piece in range(first, last + 1):
            row = piece // panels * BLOCK_ROWS
            count = min(rows - row, BLOCK_ROWS)
            panel, following = piece % panels, piece + 1
            if piece == last:
                first = following = claim(job, together)  # now, to fetch it
            for step in range(0, steps, part_steps):
                later = panel * steps + step + part_steps
                if step + part_steps >= steps:
                    later = following % panels * steps if following < pieces else -1
                multiply(job, panel, step, part_steps, row, count, sums, numbers, later)
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
    next_step: Any,
) -> None:
    """Adds the products of a part of a panel with a block of rows to their sums. `next_step`: of
    all panels', where the part begins that comes next; -1 if none does."""
    x_row, steps, step_bytes = word(job, 1), word(job, 3), panel_step_bytes(job)
    widens_few = widens(job) and word(job, 7) <= FEW_ROWS
    number_bytes = element_bytes(job) if widens_few else NUMBER_BYTES
    x = word(job, 0) + row * x_row + step * number_bytes
    count = min(steps - step, part_steps)
    part = word(job, 2) + (panel * steps + step) * step_bytes
    ids = 0
    if has_short_weights(job):
        ids = word(job, IDS_WORD) + panel * steps + step
        if next_step >= 0:
            next_ids = word(job, IDS_WORD) + next_step
            for line in range(next_ids, next_ids + part_steps, LINE_BYTES):
                prefetch(line)
    next_comes = next_step >= 0
    ahead, fetched, passes = word(job, 2) + next_step * step_bytes, step_bytes, 1
    makes = is_narrow(job) and has_short_weights(job) and rows > 1  # for all of them, before
    if rows > FEW_ROWS:
        # So many passes fetch all of the part that comes next, so much of it in each step.
        passes = min(max(2, (rows + 2) // TILE_ROWS), MOST_PASSES)
    elif not is_narrow(job):
        ahead, next_comes = part + AHEAD_BYTES, True
    if makes:
        passes += 1
    fetched = (step_bytes + passes - 1) // passes
    keeps = rows >= kept_for(job)
    done, turn = 0, 0
    if makes:
        later, distance = (ahead, fetched) if next_comes else (part, 0)
        make_words(job, part, ids, count, sums + KEPT, later, distance)
        part, ids, turn = sums + KEPT, 0, 1
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
        add = step > 0
        if keeps and done == 0:
            right, to = (part, step_bytes), (target, SUMS_ROW, add)
            keeping_4x64(
                job, place, place_row, NUMBER_BYTES, *right, count, *to, later, distance, ids
            )
            done += KEEPING_ROWS
        elif keeps and left >= TILE_ROWS:
            right, to = (sums + KEPT, MADE_STEP_BYTES), (target, SUMS_ROW, add)
            made_6x64(job, place, place_row, NUMBER_BYTES, *right, count, *to, later, distance, 0)
            done += TILE_ROWS
        else:
            done += tile(
                job, place, place_row, part, ids, count, target, add, left, later, distance
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
    ids: Any,
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
        return narrow_tile(job, x, x_row, part, ids, steps, sums, add, rows, ahead, fetched)
    place = x, x_row, step, part, size, steps, sums, SUMS_ROW, add, ahead, fetched, ids
    if rows >= 6 and rows != 8 and word(job, 7) >= MANY_ROWS:
        far_6x64(job, *place)
        return 6
    if rows >= 6 and rows != 8:
        tile_6x64(job, *place)
        return 6
    if rows >= 4:
        tile_4x64(job, *place)
        return 4
    if rows >= 2:
        tile_2x64(job, *place)
        return 2
    tile_1x64(job, *place)
    return 1


@part_of_kernel
def narrow_tile(
    job: Any,
    x: Any,
    x_row: Any,
    part: Any,
    ids: Any,
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
    size, far = made_step_bytes(job), (fetched + cuts - 1) // cuts
    for i in range(cuts):
        right, to, later = part + i * size // cuts, sums + i * sums_row // cuts, ahead
        if done == 6:
            narrow_6x16(job, x, x_row, step, right, size, steps, to, sums_row, add, later, far, 0)
        elif done == 4:
            narrow_4x16(job, x, x_row, step, right, size, steps, to, sums_row, add, later, far, 0)
        elif done == 2:
            narrow_2x32(job, x, x_row, step, right, size, steps, to, sums_row, add, later, far, 0)
        elif ids != 0:
            size = panel_step_bytes(job)
            short_1x64(job, x, x_row, step, part, size, steps, to, sums_row, add, later, far, ids)
        else:
            narrow_1x64(job, x, x_row, step, right, size, steps, to, sums_row, add, later, far, 0)
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
    """Room on the stack for the sums of a block of rows, and for a part of a panel as the tile
    takes it: 96 kB each."""
    return stack_lines(builder, (KEPT + MANY_STEPS * SUMS_ROW) // LINE_BYTES)


@instruction(types.int64)
def tile_numbers(builder: Any) -> Any:
    """Room on the stack for few widened rows, 5 kB."""
    return stack_lines(builder, FEW_ROWS * FEW_WIDENED // LINE_BYTES)


@instruction(types.boolean, JOB)
def widens(builder: Any, job: Any) -> Any:
    """Whether elements are multiplied as fp32 that are not; as constant."""
    return const(int(job[1] in WIDENED), I1)


@instruction(types.boolean, JOB)
def has_short_weights(builder: Any, job: Any) -> Any:
    return const(int(is_short(job)), I1)


@instruction(types.int64, JOB)
def kept_for(builder: Any, job: Any) -> Any:
    """For how many rows a part of a panel is made once; as constant."""
    never = job[4] or not (job[1] in WIDENED or is_short(job))
    return const(BLOCK_ROWS + 1 if never else MANY_ROWS)


@instruction(types.int64, JOB)
def made_step_bytes(builder: Any, job: Any) -> Any:
    """Of weights in sixteen bits or more, as tiles take them where registers are narrow."""
    return const(COLUMNS * (2 if job[1] in WIDENED else NUMBER_BYTES))


@instruction(types.int64, JOB)
def panel_step_bytes(builder: Any, job: Any) -> Any:
    if is_short(job):
        return const(short_bytes(row_words(job[1], COLUMNS // LANES)))
    return const(COLUMNS * (2 if job[1] in WIDENED else NUMBER_BYTES))
