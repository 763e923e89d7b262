"""The vocabulary of the compiled kernels: 16-lane vectors, and the few instructions on them.

Numba compiles Python loops over numbers; what it has no word for is added here, each word one
function that writes its LLVM IR where it is used. Vectors are plain LLVM vectors, so a CPU
without 512-bit registers runs the same kernels in halves or quarters.

A kernel's first argument is a *job*: the address of the 64-bit words it was called with. The
job's type carries the element type of the tensors, which is how one kernel's source serves all:
`f32`, `f16`, `bf16`, and `bf16_dot`, the same memory as bf16 with products in pairs by
`vdpbf16ps` (no conversion to fp32: 2.5 times as fast, cpu with AVX512-BF16 only).
"""

import inspect
import operator
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.extending import (
    intrinsic,
    lower_builtin,
    register_jitable,
    register_model,
    type_callable,
)

LANES = 16
MACHINE = platform.machine()
# A job begins with words for running it: pieces claimed, threads numbered, and the team's.
MAILBOX_WORD, CODE_WORD, SEATS_WORD, OWN_WORDS = 2, 3, 4, 5
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "bf16_dot": 2}

F32, F64, HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I1, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
HALVES, SHORTS = ir.VectorType(HALF, LANES), ir.VectorType(I16, LANES)


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def _to_string(self) -> str:
        return "bfloat"


BFLOATS = ir.VectorType(BFloat(), LANES)
PAIRS = ir.VectorType(BFloat(), 2 * LANES)


class Vector(types.Type):
    """Sixteen fp32 or int32 lanes; the int32 ones may hold pairs of bf16."""

    def __init__(self, name: str, llvm: ir.Type) -> None:
        self.llvm = llvm
        super().__init__(name=name)


class Job(types.Type):
    """The words of one call, and the element type of its tensors."""

    def __init__(self, element: str) -> None:
        self.element = element
        super().__init__(name=f"Job({element})")


# For functions that kernels call: they are only ever compiled into a kernel.
part_of_kernel = register_jitable(no_cpython_wrapper=True, no_cfunc_wrapper=True)

floats = Vector("floats", FLOATS)
ints = Vector("ints", INTS)
JOB = object()  # stands for the job in the signature of an instruction; see `instruction`


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


@register_model(Job)
class JobModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, job: Job) -> None:
        super().__init__(manager, job, ir.PointerType(I64))


def instruction(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that writes IR callable from kernels.

    It is given the IR builder and the values of its parameters; for `JOB`, always the first, a
    pair of pointer and element type.
    """

    def wrap(write: Callable[..., Any]) -> Any:
        def define(context: Any, *arguments: Any) -> Any:
            accepted = list(parameters)
            if JOB in parameters:
                accepted[0] = arguments[0]

            def generate(target: Any, builder: Any, signature: Any, values: Any) -> Any:
                if JOB in parameters:
                    values = [(values[0], accepted[0].element), *values[1:]]
                written = write(builder, *values)
                return target.get_dummy_value() if result is types.void else written

            return result(*accepted), generate

        # Numba reads names and number of arguments off the signature; the builder's stands for
        # the typing context there.
        define.__signature__ = inspect.signature(write)  # type: ignore[attr-defined]
        define.__name__ = write.__name__
        return intrinsic(define)

    return wrap


def const(value: float, llvm: ir.Type = I64) -> Any:
    if isinstance(llvm, ir.VectorType):
        return ir.Constant(llvm, [ir.Constant(llvm.element, value)] * llvm.count)
    return ir.Constant(llvm, value)


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


def masked_load(builder: Any, address: Any, llvm: Any, count: Any, align: int) -> Any:
    """The first `count` elements and zeros; reads no byte beyond."""
    name = f"llvm.masked.load.v{llvm.count}{_SUFFIX[llvm.element]}.p0"
    place, mask = pointer(builder, address, llvm), first_lanes(builder, count, llvm.count)
    return call(builder, name, llvm, place, const(align, I32), mask, ir.Constant(llvm, None))


def masked_store(builder: Any, value: Any, address: Any, count: Any, align: int) -> None:
    llvm = value.type
    name = f"llvm.masked.store.v{llvm.count}{_SUFFIX[llvm.element]}.p0"
    place, mask = pointer(builder, address, llvm), first_lanes(builder, count, llvm.count)
    call(builder, name, ir.VoidType(), value, place, const(align, I32), mask)


_SUFFIX = {F32: "f32", HALF: "f16", I16: "i16"}


def first_lanes(builder: Any, count: Any, lanes: int) -> Any:
    """A mask of the first `count` of so many lanes."""
    llvm = ir.VectorType(I32, lanes)
    numbers = ir.Constant(llvm, [ir.Constant(I32, lane) for lane in range(lanes)])
    return builder.icmp_signed("<", numbers, splat_of(builder, builder.trunc(count, I32), lanes))


# ---- words of a kernel ----


@instruction(types.int64, JOB, types.int64)
def word(builder: Any, job: Any, index: Any) -> Any:
    """The call's own word `index`."""
    return builder.load(builder.gep(job[0], [builder.add(index, const(OWN_WORDS))]))


@instruction(types.float32, JOB, types.int64)
def real(builder: Any, job: Any, index: Any) -> Any:
    """The call's own word `index`, passed as a double, to fp32."""
    bits = builder.load(builder.gep(job[0], [builder.add(index, const(OWN_WORDS))]))
    return builder.fptrunc(builder.bitcast(bits, F64), F32)


@instruction(types.int64, JOB, types.int64)
def claim(builder: Any, job: Any, count: Any) -> Any:
    """Takes the next `count` pieces of the job for this thread; gives the first one's number."""
    return builder.atomic_rmw("add", job[0], count, "acq_rel")


@instruction(types.int64, JOB)
def thread_number(builder: Any, job: Any) -> Any:
    """0, 1, .. in the order in which threads ask; to be asked once."""
    return builder.atomic_rmw("add", builder.gep(job[0], [const(1)]), const(1), "acq_rel")


@instruction(types.int64, JOB)
def element_bytes(builder: Any, job: Any) -> Any:
    return const(ELEMENT_BYTES[job[1]])


@instruction(types.boolean, JOB)
def has_dot(builder: Any, job: Any) -> Any:
    """Whether elements are multiplied in pairs; constant, so the other branch is dropped."""
    return const(int(job[1] == "bf16_dot"), I1)


@instruction(types.int64, types.int64, types.int64)
def atomic_add(builder: Any, address: Any, count: Any) -> Any:
    """Adds to a word that other threads add to; gives what it was before."""
    return builder.atomic_rmw("add", pointer(builder, address, I64), count, "acq_rel")


@instruction(types.int64, JOB)
def address_of(builder: Any, job: Any) -> Any:
    return builder.ptrtoint(job[0], I64)


@instruction(types.int64, types.int64)
def atomic_load(builder: Any, address: Any) -> Any:
    return builder.load_atomic(pointer(builder, address, I64), "seq_cst", 8)


@instruction(types.void, types.int64, types.int64)
def atomic_store(builder: Any, address: Any, value: Any) -> Any:
    builder.store_atomic(value, pointer(builder, address, I64), "seq_cst", 8)


@instruction(types.boolean, types.int64, types.int64, types.int64)
def compare_and_swap(builder: Any, address: Any, expected: Any, value: Any) -> Any:
    """Whether the word was as expected, and so has been replaced."""
    place = pointer(builder, address, I64)
    result = builder.cmpxchg(place, expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(result, 1)


@instruction(types.void)
def pause(builder: Any) -> Any:
    """Says that the core is only waiting."""
    if MACHINE == "x86_64":
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())


@instruction(types.void)
def give_way(builder: Any) -> Any:
    """Lets another thread have the core, if one wants it."""
    call(builder, "sched_yield", I32)


@instruction(types.void, types.int64, types.int64)
def sleep_while(builder: Any, address: Any, value: Any) -> Any:
    """Sleeps until it is woken up, if the 32 bits at the address have that value."""
    _futex(builder, address, 0, value)


@instruction(types.void, types.int64, types.int64)
def wake(builder: Any, address: Any, count: Any) -> Any:
    _futex(builder, address, 1, count)


def _futex(builder: Any, address: Any, operation: int, value: Any) -> None:
    """Linux's futex, private to the process, through libc's variadic `syscall`."""
    number, private = {"x86_64": 202, "aarch64": 98}.get(MACHINE, 0), 128
    known = builder.module.globals.get("syscall")
    if known is None:
        signature = ir.FunctionType(I64, [I64], var_arg=True)
        known = ir.Function(builder.module, signature, "syscall")
    nothing = const(0)
    arguments = [address, const(operation | private), value, nothing, nothing, nothing]
    builder.call(known, [const(number), *arguments])


@instruction(types.void, types.int64, types.int64)
def run_code(builder: Any, code: Any, job: Any) -> Any:
    """Calls a compiled kernel."""
    signature = ir.FunctionType(ir.VoidType(), [ir.PointerType(I64)])
    builder.call(pointer(builder, code, signature), [pointer(builder, job, I64)])


@instruction(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> Any:
    """Asks for a cache line, into the second level: the first is too small to look far ahead."""
    prefetch_line(builder, address)


def prefetch_line(builder: Any, address: Any) -> None:
    line = pointer(builder, address, ir.IntType(8))
    read, locality, data = const(0, I32), const(2, I32), const(1, I32)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), line, read, locality, data)


@instruction(types.void, types.int64, types.int64, types.int64)
def copy(builder: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    places = [pointer(builder, address, ir.IntType(8)) for address in (target, source)]
    call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), *places, num_bytes, const(0, I1))


@instruction(types.void, types.int64, types.int64)
def zero(builder: Any, target: Any, num_bytes: Any) -> Any:
    place, nothing = pointer(builder, target, ir.IntType(8)), const(0, ir.IntType(8))
    call(builder, "llvm.memset.p0.i64", ir.VoidType(), place, nothing, num_bytes, const(0, I1))


@instruction(types.int64, types.int64)
def int32_at(builder: Any, address: Any) -> Any:
    return builder.sext(load_from(builder, address, I32, 4), I64)


@instruction(types.int64, types.int64)
def int64_at(builder: Any, address: Any) -> Any:
    return load_from(builder, address, I64, 8)


@instruction(types.void, types.int64, types.int64)
def put_int64(builder: Any, address: Any, value: Any) -> Any:
    store_to(builder, value, address, 8)


@instruction(types.float32, types.int64)
def float_at(builder: Any, address: Any) -> Any:
    return load_from(builder, address, F32, 4)


@instruction(types.void, types.int64, types.float32)
def put_float(builder: Any, address: Any, value: Any) -> Any:
    store_to(builder, value, address, 4)


# ---- vectors ----


@instruction(floats, JOB, types.int64, types.int64)
def load(builder: Any, job: Any, address: Any, count: Any) -> Any:
    """Sixteen elements as fp32; if count < 16, so many and zeros, reading no byte beyond."""
    return _load(builder, address, count, job[1])


@instruction(types.void, JOB, types.int64, floats, types.int64)
def store(builder: Any, job: Any, address: Any, value: Any, count: Any) -> Any:
    """Sixteen lanes as elements; if count < 16, so many."""
    _store(builder, address, value, count, job[1])


@instruction(floats, types.int64, types.int64)
def load_fp32(builder: Any, address: Any, count: Any) -> Any:
    return _load(builder, address, count, "f32")


@instruction(types.void, types.int64, floats, types.int64)
def store_fp32(builder: Any, address: Any, value: Any, count: Any) -> Any:
    _store(builder, address, value, count, "f32")


def _load(builder: Any, address: Any, count: Any, element: str) -> Any:
    """A branch, not only a mask: masked access to 16-bit elements is slow before AVX-512."""
    llvm, align = memory_type(element), ELEMENT_BYTES[element]
    loaded = cgutils.alloca_once(builder, llvm)
    with builder.if_else(builder.icmp_signed(">=", count, const(LANES))) as (whole, part):
        with whole:
            builder.store(load_from(builder, address, llvm, align), loaded)
        with part:
            builder.store(masked_load(builder, address, llvm, count, align), loaded)
    return widened(builder, builder.load(loaded), element)


def _store(builder: Any, address: Any, value: Any, count: Any, element: str) -> None:
    value, align = narrowed(builder, value, element), ELEMENT_BYTES[element]
    with builder.if_else(builder.icmp_signed(">=", count, const(LANES))) as (whole, part):
        with whole:
            store_to(builder, value, address, align)
        with part:
            masked_store(builder, value, address, count, align)


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


@instruction(floats, floats, floats)
def with_sign_of(builder: Any, x: Any, y: Any) -> Any:
    return call(builder, "llvm.copysign.v16f32", FLOATS, x, y)


@instruction(types.float32, floats)
def total(builder: Any, x: Any) -> Any:
    """The sum of the lanes, always in the same order of pairs."""
    for width in (8, 4, 2, 1):
        x = builder.fadd(x, _rotated(builder, x, width))
    return builder.extract_element(x, const(0, I32))


@instruction(types.float32, floats)
def largest(builder: Any, x: Any) -> Any:
    for width in (8, 4, 2, 1):
        y = _rotated(builder, x, width)
        x = builder.select(builder.fcmp_ordered(">", x, y), x, y)
    return builder.extract_element(x, const(0, I32))


def _rotated(builder: Any, x: Any, count: int) -> Any:
    order = [ir.Constant(I32, (lane + count) % LANES) for lane in range(LANES)]
    return builder.shuffle_vector(x, x, ir.Constant(INTS, order))


@instruction(floats, floats)
def power_of_two(builder: Any, x: Any) -> Any:
    """2 ** x within 1.6e-7 of itself, for x limited to -126 .. 127."""
    highest = const(127.0, FLOATS)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    return _exponential(builder, x, EXP2_FINE)


@instruction(floats, JOB, floats)
def weight_of(builder: Any, job: Any, x: Any) -> Any:
    """2 ** x for x < 127; within 2.9e-6 where weights are rounded to bf16 anyway."""
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
    value = const(polynomial[0], FLOATS)
    for factor in polynomial[1:]:
        value = call(builder, "llvm.fma.v16f32", FLOATS, value, rest, const(factor, FLOATS))
    exponent = builder.shl(builder.bitcast(shifted, INTS), const(23, INTS))
    return builder.bitcast(builder.add(builder.bitcast(value, INTS), exponent), FLOATS)


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


@instruction(ints, types.int64)
def ints_at(builder: Any, address: Any) -> Any:
    return load_from(builder, address, INTS, 4)


@instruction(types.void, types.int64, ints)
def put_ints(builder: Any, address: Any, value: Any) -> Any:
    store_to(builder, value, address, 4)


def _binary(operation: Any, method: str) -> None:
    """`vector op vector` and `vector op number` in kernels."""

    @type_callable(operation)
    def typed(context: Any) -> Any:
        def result(x: Any, y: Any) -> Any:
            numbers = isinstance(y, types.Float) or y is floats
            return floats if x is floats and numbers else None

        return result

    @lower_builtin(operation, floats, floats)
    def on_vectors(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return getattr(builder, method)(*values)

    @lower_builtin(operation, floats, types.Float)
    def on_number(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number = context.cast(builder, values[1], signature.args[1], types.float32)
        return getattr(builder, method)(values[0], splat_of(builder, number))


for _operation, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _binary(_operation, _method)
