"""Rows of a quantised cache: written from fp32, and widened to what kernels compute with.

What is stored in a byte is one of few numbers, which every element type holds exactly: nothing is
rounded in reading. A row's scale, fp32, is left for the scores and the weights to be multiplied
with. A row that is not finite has an infinite scale, so what its bytes are does not matter.
"""

import struct
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import (
    BYTES,
    BYTES_32,
    ELEMENT_BYTES,
    F32,
    FLOATS,
    HALVES,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    PAIRS,
    SHORTS,
    SHORTS_32,
    call,
    const,
    load_from,
    masked_store,
    narrowed,
    offset,
    prefetch_line,
    store_to,
)
from engine.kernels.cpu.language import JOB, floats, instruction, part_of_kernel
from engine.kernels.cpu.memory import (
    copy,
    element_bytes,
    int64_at,
    load_fp32,
    put_float,
    put_int64,
    store_fp32,
)
from engine.kernels.cpu.paged import (
    ADDRESS_BYTES,
    GROUP,
    SCALE_BYTES,
    SCALES_LIST,
    TILE,
    value_scales_behind,
)
from engine.kernels.cpu.vectors import kept, rotated, splat

SMALLEST_ROW = 2.0**-100  # its largest element; below, 1 / scale could overflow
STEP = 64  # elements that are widened together: a line of the cache
SCALES_BYTES = 2 * TILE * SCALE_BYTES  # of a tile's keys, then of its values


class Float8(NamedTuple):
    """A sign, then an exponent, then a mantissa of so many bits."""

    mantissa: int
    bias: int

    @property
    def least(self) -> float:
        """The smallest number that is not subnormal."""
        return float(2.0 ** (1 - self.bias))


FLOAT8 = {"fp8_e4m3": Float8(3, 7), "fp8_e5m2": Float8(2, 15)}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}


@part_of_kernel
def widened_bytes(dim: int, value_dim: int, element_size: int) -> Any:
    """Room for a tile's keys or values, and for what the last step writes beyond them."""
    return (TILE * max(dim, value_dim) + STEP) * element_size


@part_of_kernel
def widen(job: Any, groups: Any, count: Any, dim: Any, target: Any, ahead: Any) -> None:
    """Widens so many listed groups of rows, and lists where they are now; asks for those listed
    in `ahead` meanwhile."""
    size = GROUP * dim
    for i in range(count):
        place = groups + i * ADDRESS_BYTES
        widen_run(job, int64_at(place), size, target, int64_at(ahead + i * ADDRESS_BYTES))
        put_int64(place, target)
        target += size * element_bytes(job)


@part_of_kernel
def gather_scales(job: Any, lists: Any, start: Any, first: Any, end: Any, scales: Any) -> None:
    """Of a tile's keys and values; 0 for values outside first .. end, whose scales may be NaN."""
    row, values = GROUP * SCALE_BYTES, scales + TILE * SCALE_BYTES
    for i in range(TILE // GROUP):
        source = int64_at(lists + SCALES_LIST + i * ADDRESS_BYTES)
        copy(scales + i * row, source, GROUP * SCALE_BYTES)
        copy(values + i * row, source + value_scales_behind(job), GROUP * SCALE_BYTES)
    for i in range(0, TILE, LANES):
        seen = kept(load_fp32(values + i * SCALE_BYTES, LANES), start + i, first, end, 0.0)
        store_fp32(values + i * SCALE_BYTES, seen, LANES)


@part_of_kernel
def quantise(job: Any, row: Any, dim: Any, target: Any, scale: Any) -> None:
    """A row of fp32 to its place and its scale's."""
    highest = splat(0.0)
    for i in range(0, dim, LANES):
        highest = larger_magnitude(highest, load_fp32(row + i * 4, dim - i))
    factor = scale_of(job, highest)
    put_float(scale, factor)
    factor = inverse(factor)
    for i in range(0, dim, LANES):
        store_bytes(job, target + i, load_fp32(row + i * 4, dim - i) * factor, dim - i)


@instruction(types.void, JOB, types.int64, types.int64, types.int64, types.int64)
def widen_run(b: Any, job: Any, source: Any, count: Any, target: Any, ahead: Any) -> None:
    """Elements that lie one after the other, and up to 63 more of the block: a run ends before
    the scales, of which there are as many bytes."""
    element, quantised = job[1], job[3]
    if not quantised:
        return
    stride = const(ELEMENT_BYTES[element])
    with cgutils.for_range_slice(b, const(0), count, const(STEP), I64) as (i, _):
        prefetch_line(b, b.add(ahead, i))
        for part in range(0, STEP, 2 * LANES):
            at = offset(b, i, part)
            place = b.add(target, b.mul(at, stride))
            _widen_two(b, b.add(source, at), element, quantised, place)


def _widen_two(b: Any, source: Any, element: str, quantised: str, target: Any) -> None:
    """Two vectors of elements."""
    if element == "bf16_dot" and quantised in FLOAT8:
        store_to(b, _bfloats(b, load_from(b, source, BYTES_32, 1), quantised), target, 2)
        return
    parts = [
        _fp32(b, load_from(b, offset(b, source, LANES * i), BYTES, 1), quantised) for i in range(2)
    ]
    if element == "bf16_dot":
        both = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, parts[1], parts[0])
        store_to(b, both, target, 2)
        return
    size = ELEMENT_BYTES[element]
    for i, part in enumerate(parts):
        store_to(b, narrowed(b, part, element), offset(b, target, LANES * size * i), size)


def _bfloats(b: Any, value: Any, name: str) -> Any:
    """fp8 to bf16 in as many integer instructions as conversions by way of fp32 would wait for
    one port: exponent and mantissa move together, subnormal numbers come from a table."""
    form = FLOAT8[name]
    shift, least = 7 - form.mantissa, form.least / 2**form.mantissa
    words = b.sext(value, SHORTS_32)
    size = b.and_(b.shl(words, const(shift, SHORTS_32)), const(0x7F << shift, SHORTS_32))
    normal = b.add(size, const((127 - form.bias) << 7, SHORTS_32))
    small = [_bfloat_bits(i * least if i < 1 << form.mantissa else 0.0) for i in range(32)]
    table = ir.Constant(SHORTS_32, [ir.Constant(I16, bits) for bits in small])
    looked_up = call(b, "llvm.x86.avx512.permvar.hi.512", SHORTS_32, table, words)
    exponent = b.and_(words, const(0x7F >> form.mantissa << form.mantissa, SHORTS_32))
    is_small = b.icmp_unsigned("==", exponent, const(0, SHORTS_32))
    return b.or_(b.select(is_small, looked_up, normal), b.and_(words, const(0x8000, SHORTS_32)))


def _bfloat_bits(number: float) -> int:
    return int.from_bytes(struct.pack("<f", number)[2:], "little")


def _fp32(b: Any, value: Any, quantised: str) -> Any:
    if quantised == "int8":
        return b.sitofp(b.sext(value, INTS), FLOATS)
    if quantised == "fp8_e5m2":  # the upper byte of an fp16
        half = b.shl(b.zext(value, SHORTS), const(8, SHORTS))
        return b.fpext(b.bitcast(half, HALVES), FLOATS)
    # as fp16, exponents are 8 less; the sign is there twice, and the lower one goes
    half = b.and_(b.shl(b.sext(value, SHORTS), const(7, SHORTS)), const(0xBF80, SHORTS))
    return b.fmul(b.fpext(b.bitcast(half, HALVES), FLOATS), const(256.0, FLOATS))


@instruction(floats, floats, floats)
def larger_magnitude(b: Any, x: Any, y: Any) -> Any:
    """The larger one of the bits of x and y without signs: a NaN is larger than all numbers."""
    bits = b.and_(b.bitcast(y, INTS), const(0x7FFFFFFF, INTS))
    x = b.bitcast(x, INTS)
    return b.bitcast(b.select(b.icmp_unsigned(">", bits, x), bits, x), FLOATS)


@instruction(types.float32, JOB, floats)
def scale_of(b: Any, job: Any, highest: Any) -> Any:
    """Of a row whose largest magnitude is in one of the lanes."""
    if not job[3]:
        return const(0.0, F32)
    bits = b.bitcast(highest, INTS)
    for width in (8, 4, 2, 1):
        other = rotated(b, bits, width)
        bits = b.select(b.icmp_unsigned(">", other, bits), other, bits)
    peak = b.bitcast(b.extract_element(bits, const(0, I32)), F32)
    scale = b.fdiv(peak, const(LARGEST[job[3]], F32))
    infinity = const(float("inf"), F32)
    scale = b.select(b.fcmp_ordered("<", peak, infinity), scale, infinity)
    return b.select(b.fcmp_ordered("<", peak, const(SMALLEST_ROW, F32)), const(1.0, F32), scale)


@instruction(types.float32, types.float32)
def inverse(b: Any, x: Any) -> Any:
    return b.fdiv(const(1.0, F32), x)


@instruction(types.void, JOB, types.int64, floats, types.int64)
def store_bytes(b: Any, job: Any, address: Any, value: Any, count: Any) -> None:
    """Sixteen lanes as what is stored; if count < 16, so many."""
    if not job[3]:
        return
    value = _int8(b, value) if job[3] == "int8" else _float8(b, value, job[3])
    stored = b.trunc(value, BYTES)
    with b.if_else(b.icmp_signed(">=", count, const(LANES))) as (whole, part):
        with whole:
            store_to(b, stored, address, 1)
        with part:
            masked_store(b, stored, address, count, 1, job[4])


def _int8(b: Any, value: Any) -> Any:
    """Adding 1.5 * 2 ** 23 rounds to nearest even, and leaves the integer in the low bits."""
    for bound, beyond in (
        (const(LARGEST["int8"], FLOATS), ">"),
        (const(-LARGEST["int8"], FLOATS), "<"),
    ):
        value = b.select(b.fcmp_ordered(beyond, value, bound), bound, value)
    return b.bitcast(b.fadd(value, const(12582912.0, FLOATS)), INTS)


def _float8(b: Any, value: Any, name: str) -> Any:
    """Rounded to nearest even: in the bits, or where numbers are subnormal by adding one whose
    last place is that of theirs."""
    form, largest = FLOAT8[name], const(LARGEST[name], FLOATS)
    dropped = 23 - form.mantissa
    bits = b.bitcast(value, INTS)
    sign = b.and_(b.lshr(bits, const(24, INTS)), const(0x80, INTS))
    size = b.bitcast(b.and_(bits, const(0x7FFFFFFF, INTS)), FLOATS)
    size = b.select(b.fcmp_ordered(">", size, largest), largest, size)
    size = b.select(b.fcmp_ordered("ord", size, size), size, const(0.0, FLOATS))
    bits = b.bitcast(size, INTS)
    odd = b.and_(b.lshr(bits, const(dropped, INTS)), const(1, INTS))
    rounded = b.add(bits, b.add(odd, const((1 << dropped - 1) - 1, INTS)))
    normal = b.sub(
        b.lshr(rounded, const(dropped, INTS)), const((127 - form.bias) << form.mantissa, INTS)
    )
    anchor = const(form.least * 2.0**dropped, FLOATS)
    small = b.sub(b.bitcast(b.fadd(size, anchor), INTS), b.bitcast(anchor, INTS))
    is_small = b.fcmp_ordered("<", size, const(form.least, FLOATS))
    return b.or_(sign, b.select(is_small, small, normal))
