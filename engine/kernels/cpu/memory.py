"""Instructions on a job's words and on memory, by address."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.kernels.cpu.emit import (
    ELEMENT_BYTES,
    F32,
    F64,
    I1,
    I32,
    I64,
    LANES,
    call,
    const,
    load_from,
    masked_load,
    masked_store,
    memory_type,
    narrowed,
    pointer,
    prefetch_line,
    store_to,
    widened,
)
from engine.kernels.cpu.language import JOB, floats, instruction

# A job begins with words for running it: pieces claimed, threads numbered, and the team's.
MAILBOX_WORD, CODE_WORD, SEATS_WORD, OWN_WORDS = 2, 3, 4, 5


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


@instruction(types.int64, JOB)
def cached_bytes(builder: Any, job: Any) -> Any:
    """Of an element as it lies in the cache."""
    return const(1 if job[3] else ELEMENT_BYTES[job[1]])


@instruction(types.boolean, JOB)
def is_quantised(builder: Any, job: Any) -> Any:
    """Whether the cache is, as constant."""
    return const(int(bool(job[3])), I1)


@instruction(types.boolean, JOB)
def has_dot(builder: Any, job: Any) -> Any:
    """Whether elements are multiplied in pairs; constant, so the other branch is dropped."""
    return const(int(job[1] == "bf16_dot"), I1)


@instruction(types.boolean, JOB)
def is_narrow(builder: Any, job: Any) -> Any:
    """Whether registers are few and narrow; as constant."""
    return const(int(job[4]), I1)


@instruction(types.int64, JOB)
def address_of(builder: Any, job: Any) -> Any:
    return builder.ptrtoint(job[0], I64)


@instruction(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> Any:
    """Asks for a cache line, into the second level: the first is too small to look far ahead."""
    prefetch_line(builder, address)


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


@instruction(floats, JOB, types.int64, types.int64)
def load(builder: Any, job: Any, address: Any, count: Any) -> Any:
    """Sixteen elements as fp32; if count < 16, so many and zeros, reading no byte beyond."""
    return _load(builder, address, count, job[1], job[4])


@instruction(types.void, JOB, types.int64, floats, types.int64)
def store(builder: Any, job: Any, address: Any, value: Any, count: Any) -> Any:
    """Sixteen lanes as elements; if count < 16, so many."""
    _store(builder, address, value, count, job[1], job[4])


@instruction(floats, types.int64, types.int64)
def load_fp32(builder: Any, address: Any, count: Any) -> Any:
    return _load(builder, address, count, "f32")


@instruction(types.void, types.int64, floats, types.int64)
def store_fp32(builder: Any, address: Any, value: Any, count: Any) -> Any:
    _store(builder, address, value, count, "f32")


def _load(builder: Any, address: Any, count: Any, element: str, narrow: bool = False) -> Any:
    """A branch, not only a mask: masked access to 16-bit elements is slow before AVX-512."""
    llvm, align = memory_type(element), ELEMENT_BYTES[element]
    loaded = cgutils.alloca_once(builder, llvm)
    with builder.if_else(builder.icmp_signed(">=", count, const(LANES))) as (whole, part):
        with whole:
            builder.store(load_from(builder, address, llvm, align), loaded)
        with part:
            part_of_it = masked_load(builder, address, llvm, count, align, narrow)
            builder.store(part_of_it, loaded)
    return widened(builder, builder.load(loaded), element)


def _store(
    builder: Any, address: Any, value: Any, count: Any, element: str, narrow: bool = False
) -> None:
    value, align = narrowed(builder, value, element), ELEMENT_BYTES[element]
    with builder.if_else(builder.icmp_signed(">=", count, const(LANES))) as (whole, part):
        with whole:
            store_to(builder, value, address, align)
        with part:
            masked_store(builder, value, address, count, align, narrow)
