"""Weights of bf16 in twelve bits: all of them exact, and a quarter less to read.

A step of few rows takes as long as its weights are read. The upper byte of a weight is its sign
and most of its exponent, and the weights of one step of a panel, 64 columns and one or two inputs,
have no more than sixteen different ones there. So four bits say which, and the product's tile looks
them up in registers, in the time that memory takes anyway.

A step comes as the lower bytes of its weights and four bits of each behind them. Which table of
sixteen bytes is its own stands in a byte elsewhere. Nearly all have the same: of a normal
distribution, whatever its width, all but one weight in ten thousand are in that.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import (
    BYTES,
    BYTES_32,
    I8,
    I64,
    INTS,
    LANES,
    LINE_BYTES,
    VECTOR_BYTES,
    call,
    const,
    lane_numbers,
    load_from,
    offset,
    prefetch_line,
    store_to,
)
from engine.kernels.cpu.language import JOB, instruction, part_of_kernel
from engine.kernels.cpu.memory import OWN_WORDS, claim, int64_at, is_narrow, word

SHORT = "short"  # how weights are stored, in a kernel's element type
SHORTEN_WORDS, ROWS_WORDS = "5q", "7q"
WORDS = "2q"  # of a product with short weights, behind those that every product has
TABLES_WORD, IDS_WORD = 9, 10  # those: [256, 16] bytes, and which of them a step has
CODES, NO_CODE = 16, 255
COLUMNS = 64
PART = 64  # weights that are put together at once, two vectors of them
_PIECE_STEPS = 512
_LINE = ir.VectorType(I8, LINE_BYTES)
_QUADS, _HALF_QUADS = ir.VectorType(I64, 8), ir.VectorType(I64, 4)


def short_bytes(words: int) -> int:
    """Of a step with so many weights."""
    return words * 3 // 2


def shorten(job: Any) -> None:
    """Panels of weights to short ones. Pieces are steps."""
    plain, short, count = word(job, 0), word(job, 1), word(job, 3)
    codes, is_odd = word(job, 2), word(job, 4)  # of 256 upper bytes, or NO_CODE; of steps
    words, short_step = step_words(job), short_step_bytes(job)
    while True:
        first = claim(job, _PIECE_STEPS)
        if first >= count:
            return
        for step in range(first, min(first + _PIECE_STEPS, count)):
            source, target = plain + step * words * 2, short + step * short_step
            odd = False
            for half in range(words // 2):
                lower, upper = source + word_of(half) * 2, source + word_of(half + words // 2) * 2
                low = byte_at(codes + byte_at(lower + 1))
                high = byte_at(codes + byte_at(upper + 1))
                odd |= (low == NO_CODE) | (high == NO_CODE)
                put_byte(target + words + half, (low & 15) | (high & 15) << 4)
                put_byte(target + half, byte_at(lower))
                put_byte(target + half + words // 2, byte_at(upper))
            put_byte(is_odd + step, 1 if odd else 0)


def short_rows(job: Any) -> None:
    """Rows of the weight as they were, one word after the other. Pieces are rows."""
    panels, steps, numbers, count = word(job, 0), word(job, 1), word(job, 2), word(job, 3)
    out, tables, ids = word(job, 4), word(job, 5), word(job, 6)
    words, step_bytes = step_words(job), short_step_bytes(job)
    inputs = words // COLUMNS
    while True:
        row = claim(job, 1)
        if row >= count:
            return
        number = int64_at(numbers + row * 8)
        panel, column = number // COLUMNS, number % COLUMNS
        # Where its words are among those of a step, as the packing has laid them, and here.
        among = column * 2
        if inputs == 1:
            lanes = LANES // 2 if is_narrow(job) else LANES
            among = column // (2 * lanes) * (2 * lanes) + column % lanes * 2 + column // lanes % 2
        place = among // PART * PART + among % 32 // 8 * 16 + among % PART // 32 * 8 + among % 8
        target = out + row * steps * inputs * 2
        for i in range(steps * inputs):
            step, at = panel * steps + i // inputs, place + i % inputs
            source = panels + step * step_bytes
            code = byte_at(source + words + at % (words // 2)) >> at // (words // 2) * 4 & 15
            put_byte(target + i * 2, byte_at(source + at))
            put_byte(target + i * 2 + 1, byte_at(tables + byte_at(ids + step) * CODES + code))


@part_of_kernel
def word_of(byte: Any) -> Any:
    """Whose lower byte lies here among those of a step: two vectors of words are interleaved within
    each 128 bits, as is cheapest."""
    return byte // PART * PART + byte % PART // 16 * 8 + byte // 8 % 2 * 32 + byte % 8


def short_row(b: Any, job: Any, address: Any, id: Any, vectors: int) -> list[Any]:
    """The words of a step, put together in so many vectors; `id` is where its table's number is."""
    number = b.zext(load_from(b, id, I8, 1), I64)
    tables = b.load(b.gep(job[0], [const(OWN_WORDS + TABLES_WORD)]))
    table = load_from(b, b.add(tables, b.mul(number, const(CODES))), BYTES, 1)
    table = b.shuffle_vector(table, table, lane_numbers(list(range(LANES)) * 4))
    made = []
    for part, codes in enumerate(_codes(b, offset(b, address, vectors * PART // 2), vectors // 2)):
        low = load_from(b, offset(b, address, part * PART), _LINE, 1)
        high = _looked_up(b, job, table, b.bitcast(codes, _LINE))
        for upper in range(2):
            order = [
                byte + source
                for lane in range(8 * upper, LINE_BYTES, 16)
                for byte in range(lane, lane + 8)
                for source in (0, LINE_BYTES)
            ]
            made.append(b.bitcast(b.shuffle_vector(low, high, lane_numbers(order)), INTS))
    return made


def _codes(b: Any, address: Any, parts: int) -> list[Any]:
    """Of one part or two, in the lower half of each byte: bytes hold one of the first half of a
    step's weights, and one of the second."""
    if parts == 1:
        codes = load_from(b, address, _HALF_QUADS, 1)
        both = b.shuffle_vector(codes, codes, lane_numbers([*range(4)] * 2))
        return [b.lshr(both, ir.Constant(_QUADS, [0] * 4 + [4] * 4))]
    codes = load_from(b, address, _QUADS, 1)
    return [codes, b.lshr(codes, const(4, _QUADS))]


def _looked_up(b: Any, job: Any, table: Any, codes: Any) -> Any:
    """In a table that stands four times in a line."""
    if job[1] == "bf16_dot":
        return call(b, "llvm.x86.avx512.permvar.qi.512", _LINE, table, codes)
    codes = b.and_(codes, const(15, _LINE))
    if not job[4]:
        return call(b, "llvm.x86.avx512.pshuf.b.512", _LINE, table, codes)
    halves = []
    for start in (0, BYTES_32.count):
        order = lane_numbers(range(start, start + BYTES_32.count))
        half, of_it = (b.shuffle_vector(x, x, order) for x in (table, codes))
        halves.append(call(b, "llvm.x86.avx2.pshuf.b", BYTES_32, half, of_it))
    return b.shuffle_vector(*halves, lane_numbers(range(LINE_BYTES)))


@instruction(types.void, JOB, *[types.int64] * 6)
def make_words(
    b: Any, job: Any, part: Any, ids: Any, steps: Any, out: Any, ahead: Any, ahead_step: Any
) -> None:
    """So many steps of short weights to those of sixteen bits; each asks for a line ahead."""
    if not is_short(job):
        return
    words = _step_words(job)
    with cgutils.for_range(b, steps) as loop:
        place = b.add(part, b.mul(loop.index, const(short_bytes(words))))
        target = b.add(out, b.mul(loop.index, const(2 * words)))
        prefetch_line(b, b.add(ahead, b.mul(loop.index, ahead_step)))
        made = short_row(b, job, place, b.add(ids, loop.index), words // PART * 2)
        for i, vector in enumerate(made):
            store_to(b, vector, offset(b, target, i * VECTOR_BYTES), VECTOR_BYTES)


@instruction(types.int64, types.int64)
def byte_at(builder: Any, address: Any) -> Any:
    return builder.zext(load_from(builder, address, I8, 1), I64)


@instruction(types.void, types.int64, types.int64)
def put_byte(builder: Any, address: Any, value: Any) -> None:
    store_to(builder, builder.trunc(value, I8), address, 1)


def is_short(job: Any) -> bool:
    return bool(job[3] == SHORT)


def _step_words(job: Any) -> int:
    return COLUMNS * (2 if job[1] == "bf16_dot" else 1)


@instruction(types.int64, JOB)
def step_words(builder: Any, job: Any) -> Any:
    return const(_step_words(job))


@instruction(types.int64, JOB)
def short_step_bytes(builder: Any, job: Any) -> Any:
    return const(short_bytes(_step_words(job)))
