"""Instructions on vectors of sixteen fp32."""

from typing import Any

from llvmlite import ir
from numba.core import types

from engine.kernels.cpu.emit import F32, FLOATS, I16, I32, INTS, LANES, call, const, splat_of
from engine.kernels.cpu.language import JOB, floats, instruction


@instruction(floats, types.float32)
def splat(builder: Any, value: Any) -> Any:
    return splat_of(builder, value)


@instruction(types.float32, types.float32)
def root(builder: Any, x: Any) -> Any:
    return call(builder, "llvm.sqrt.f32", F32, x)


@instruction(floats, floats, floats, floats)
def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z."""
    return call(builder, "llvm.fma.v16f32", FLOATS, x, y, z)


@instruction(floats, floats, types.int64, types.int64, types.int64, types.float32)
def kept(builder: Any, x: Any, number: Any, first: Any, end: Any, other: Any) -> Any:
    """x where the lane's number, `number` in the first lane, is in first .. end, else other."""
    lanes = ir.Constant(INTS, [ir.Constant(I32, lane) for lane in range(LANES)])
    number, first, end = (builder.trunc(n, I32) for n in (number, first, end))
    numbers = builder.add(lanes, splat_of(builder, number))
    after = builder.icmp_signed(">=", numbers, splat_of(builder, first))
    before = builder.icmp_signed("<", numbers, splat_of(builder, end))
    return builder.select(builder.and_(after, before), x, splat_of(builder, other))


@instruction(floats, floats, types.int64, floats, types.int64, types.float32)
def where_between(builder: Any, x: Any, number: Any, last: Any, span: Any, other: Any) -> Any:
    """x where the number is one of the `span` numbers up to the lane's last, else other."""
    number, span = (splat_of(builder, builder.sitofp(n, F32)) for n in (number, span))
    before = builder.fcmp_ordered("<=", number, last)
    after = builder.fcmp_ordered("<", last, builder.fadd(number, span))
    return builder.select(builder.and_(before, after), x, splat_of(builder, other))


@instruction(floats, floats, floats, floats, floats)
def above(builder: Any, x: Any, bound: Any, result: Any, other: Any) -> Any:
    """`result` where x > bound, else `other`."""
    return builder.select(builder.fcmp_ordered(">", x, bound), result, other)


@instruction(floats, floats, floats)
def maximum(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@instruction(floats, floats)
def magnitude(builder: Any, x: Any) -> Any:
    return call(builder, "llvm.fabs.v16f32", FLOATS, x)


@instruction(types.float32, floats)
def total(builder: Any, x: Any) -> Any:
    """The sum of the lanes, always in the same order of pairs."""
    for width in (8, 4, 2, 1):
        x = builder.fadd(x, rotated(builder, x, width))
    return builder.extract_element(x, const(0, I32))


@instruction(types.float32, floats)
def largest(builder: Any, x: Any) -> Any:
    for width in (8, 4, 2, 1):
        y = rotated(builder, x, width)
        x = builder.select(builder.fcmp_ordered(">", x, y), x, y)
    return builder.extract_element(x, const(0, I32))


def rotated(builder: Any, x: Any, count: int) -> Any:
    """Each lane gets what so many lanes further is."""
    order = [ir.Constant(I32, (lane + count) % LANES) for lane in range(LANES)]
    return builder.shuffle_vector(x, x, ir.Constant(INTS, order))


@instruction(floats, floats)
def power_of_two(builder: Any, x: Any) -> Any:
    """2 ** x within 1.6e-7 of itself, for x limited to -126 .. 127."""
    highest = const(127.0, FLOATS)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    return _exponential(builder, x, EXP2_FINE)


LOG2_E = 1.4426950408889634
LEAST_WEIGHT = 2.0**-126


@instruction(floats, JOB, floats)
def weight_of(builder: Any, job: Any, x: Any) -> Any:
    """2 ** x for x < 127, and not less than LEAST_WEIGHT; within 2.9e-6 where weights are rounded
    to bf16 anyway. A CPU with tiles has instructions for it, and no least weight."""
    if job[2]:
        return _scaled(builder, x)
    return _exponential(builder, x, EXP2_COARSE if job[1] == "bf16_dot" else EXP2_FINE)


def _exponential(builder: Any, x: Any, polynomial: tuple[float, ...]) -> Any:
    """Adding 1.5 * 2 ** 23 rounds x to an integer and leaves it in the low bits, from where a
    shift takes it to the exponent; what is left, in -0.5 .. 0.5, goes through a polynomial.
    """
    lowest = const(-126.0, FLOATS)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)  # a NaN stays one
    magic = const(12582912.0, FLOATS)
    shifted = builder.fadd(x, magic)
    rest = builder.fsub(x, builder.fsub(shifted, magic))
    value = _polynomial(builder, rest, polynomial)
    exponent = builder.shl(builder.bitcast(shifted, INTS), const(23, INTS))
    return builder.bitcast(builder.add(builder.bitcast(value, INTS), exponent), FLOATS)


def _scaled(builder: Any, x: Any) -> Any:
    """By the instructions that take an integer off a number, and multiply with a power of two."""
    every, nearest = const(-1, I16), const(4, I32)  # lanes, and as rounding is set
    floor, nothing = const(1, I32), ir.Constant(FLOATS, None)
    rest = call(
        builder, "llvm.x86.avx512.mask.reduce.ps.512", FLOATS, x, floor, nothing, every, nearest
    )
    value = _polynomial(builder, rest, EXP2_ABOVE)
    return call(
        builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, value, x, nothing, every, nearest
    )


def _polynomial(builder: Any, x: Any, factors: tuple[float, ...]) -> Any:
    value = const(factors[0], FLOATS)
    for factor in factors[1:]:
        value = call(builder, "llvm.fma.v16f32", FLOATS, value, x, const(factor, FLOATS))
    return value


# Best relative fits to 2 ** x in -0.5 .. 0.5 that are 1 at 0, highest power first: a row whose
# maximum stays must keep its sums to the last bit.
EXP2_FINE = (
    0.001326472731307149,
    0.009671512991189957,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
    1.0,
)


EXP2_COARSE = (
    0.009582852944731712,
    0.055906426161527634,
    0.24024099111557007,
    0.6931241750717163,
    1.0,
)

# The same in 0 .. 1, within 2.9e-6.
EXP2_ABOVE = (
    0.013426684789994908,
    0.05224247306387599,
    0.24128020556689608,
    0.6930448447285008,
    1.0,
)
