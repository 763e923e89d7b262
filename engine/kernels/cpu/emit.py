"""Writing LLVM IR: types, constants, loads, stores and conversions of every element type."""

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine.kernels.cpu.features import asks_once

LANES = 16
VECTOR_BYTES = LINE_BYTES = 64  # of fp32 lanes, and of memory in a cache
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "bf16_dot": 2}

F32, F64, HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
NARROW_FLOATS, NARROW_INTS = (ir.VectorType(llvm, LANES // 2) for llvm in (F32, I32))
HALVES, SHORTS = ir.VectorType(HALF, LANES), ir.VectorType(I16, LANES)
BYTES = ir.VectorType(I8, LANES)
BYTES_32, SHORTS_32 = ir.VectorType(I8, 2 * LANES), ir.VectorType(I16, 2 * LANES)


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def _to_string(self) -> str:
        return "bfloat"


BFLOATS = ir.VectorType(BFloat(), LANES)
PAIRS = ir.VectorType(BFloat(), 2 * LANES)


def const(value: float, llvm: ir.Type = I64) -> Any:
    if isinstance(llvm, ir.VectorType):
        return ir.Constant(llvm, [ir.Constant(llvm.element, value)] * llvm.count)
    return ir.Constant(llvm, value)


def lane_numbers(order: Iterable[int]) -> Any:
    """Of a shuffle's result, or the lanes' own."""
    numbers = [ir.Constant(I32, lane) for lane in order]
    return ir.Constant(ir.VectorType(I32, len(numbers)), numbers)


def pointer(builder: Any, address: Any, llvm: ir.Type) -> Any:
    return builder.inttoptr(address, ir.PointerType(llvm))


def load_from(builder: Any, address: Any, llvm: ir.Type, align: int) -> Any:
    value = builder.load(pointer(builder, address, llvm))
    value.align = align
    return value


def store_to(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, pointer(builder, address, value.type)).align = align


def offset(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, const(num_bytes))


def call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    known = builder.module.globals.get(name)
    if known is None:
        signature = ir.FunctionType(result, [value.type for value in values])
        known = ir.Function(builder.module, signature, name)
    return builder.call(known, values)


def splat_of(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    llvm = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(llvm, ir.Undefined), scalar, const(0, I32))
    return builder.shuffle_vector(first, first, const(0, ir.VectorType(I32, lanes)))


def memory_type(element: str) -> ir.Type:
    return {"f32": FLOATS, "f16": HALVES}.get(element, SHORTS)


def widened(builder: Any, value: Any, element: str) -> Any:
    """Sixteen elements as they lie in memory, to fp32."""
    if element == "f32":
        return value
    if element == "f16":
        return builder.fpext(value, FLOATS)
    return builder.bitcast(builder.shl(builder.zext(value, INTS), const(16, INTS)), FLOATS)


def parted(builder: Any, words: Any) -> Any:
    """Eight words of two bf16 each, to fp32: first the lower ones, then the upper ones. Half of
    the instructions that leave them in order, where registers have eight lanes."""
    lower = builder.shl(words, const(16, words.type))
    upper = builder.and_(words, const(-1 << 16, words.type))
    both = builder.shuffle_vector(lower, upper, lane_numbers(range(LANES)))
    return builder.bitcast(both, FLOATS)


def in_two(builder: Any, x: Any) -> list[Any]:
    """A vector's halves, each as wide as a narrow register."""
    half = LANES // 2
    orders = [lane_numbers(range(start, start + half)) for start in (0, half)]
    return [builder.shuffle_vector(x, x, order) for order in orders]


def narrowed(builder: Any, value: Any, element: str) -> Any:
    """fp32 to sixteen elements, rounding to nearest even."""
    if element == "f32":
        return value
    if element == "f16":
        return builder.fptrunc(value, HALVES)
    if element == "bf16_dot":  # vcvtneps2bf16
        return builder.bitcast(builder.fptrunc(value, BFLOATS), SHORTS)
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, const(16, INTS)), const(1, INTS))
    rounded = builder.add(bits, builder.add(odd, const(0x7FFF, INTS)))
    # The carry would turn a NaN into a number.
    number = builder.fcmp_ordered("ord", value, value)
    kept = builder.select(number, rounded, builder.or_(bits, const(0x400000, INTS)))
    return builder.trunc(builder.lshr(kept, const(16, INTS)), SHORTS)


def masked_load(
    builder: Any, address: Any, llvm: Any, count: Any, align: int, narrow: bool = False
) -> Any:
    """The first `count` elements and zeros; reads no byte beyond.

    With narrow registers one by one, if they are small: LLVM would write a branch for each.
    """
    if narrow and llvm.element != F32:
        return _gathered(builder, address, llvm, count)
    name = f"llvm.masked.load.v{llvm.count}{_SUFFIX[llvm.element]}.p0"
    place, mask = pointer(builder, address, llvm), first_lanes(builder, count, llvm.count)
    return call(builder, name, llvm, place, const(align, I32), mask, ir.Constant(llvm, None))


def masked_store(
    builder: Any, value: Any, address: Any, count: Any, align: int, narrow: bool = False
) -> None:
    llvm = value.type
    if narrow and llvm.element != F32:
        _scatter(builder, value, address, count)
        return
    name = f"llvm.masked.store.v{llvm.count}{_SUFFIX[llvm.element]}.p0"
    place, mask = pointer(builder, address, llvm), first_lanes(builder, count, llvm.count)
    call(builder, name, ir.VoidType(), value, place, const(align, I32), mask)


def _gathered(builder: Any, address: Any, llvm: Any, count: Any) -> Any:
    nothing = ir.Constant(llvm, None)
    place = cgutils.alloca_once(builder, llvm)
    builder.store(nothing, place)
    _copy(builder, llvm.element, pointer(builder, address, llvm.element), place, count)
    return builder.load(place)


def _scatter(builder: Any, value: Any, address: Any, count: Any) -> None:
    place = cgutils.alloca_once(builder, value.type)
    builder.store(value, place)
    element = value.type.element
    _copy(builder, element, place, pointer(builder, address, element), count)


def _copy(builder: Any, element: Any, source: Any, target: Any, count: Any) -> None:
    source, target = (builder.bitcast(p, ir.PointerType(element)) for p in (source, target))
    with cgutils.for_range(builder, count) as loop:
        places = [builder.gep(place, [loop.index]) for place in (source, target)]
        builder.store(builder.load(places[0]), places[1])


_SUFFIX = {F32: "f32", HALF: "f16", I16: "i16", I8: "i8"}


def first_lanes(builder: Any, count: Any, lanes: int) -> Any:
    """A mask of the first `count` of so many lanes."""
    llvm = ir.VectorType(I32, lanes)
    numbers = ir.Constant(llvm, [ir.Constant(I32, lane) for lane in range(lanes)])
    return builder.icmp_signed("<", numbers, splat_of(builder, builder.trunc(count, I32), lanes))


def stack_lines(builder: Any, count: int) -> Any:
    """The address of so many lines of this call's stack. What is in them is undefined: each is
    written before it is read. Numba's own allocation writes zeros to all of them first, which was
    a third of what a product's call costs."""
    with builder.goto_entry_block():
        return builder.ptrtoint(builder.alloca(ir.ArrayType(FLOATS, count)), I64)


def prefetch_line(builder: Any, address: Any, *, once: bool = False) -> None:
    """Into the second cache level. What is used up before it leaves the first one is asked for
    `once`: there alone, so that it puts nothing else out, on a CPU that has the room."""
    line = pointer(builder, address, ir.IntType(8))
    near = const(0 if once and asks_once() else 2, I32)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), line, const(0, I32), near, const(1, I32))
