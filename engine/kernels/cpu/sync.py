"""Instructions for threads: atomic words, waiting, and running a compiled kernel."""

import platform
from typing import Any

from llvmlite import ir
from numba.core import types

from engine.kernels.cpu.emit import I32, I64, call, const, pointer
from engine.kernels.cpu.language import instruction

MACHINE = platform.machine()


@instruction(types.int64, types.int64, types.int64)
def atomic_add(builder: Any, address: Any, count: Any) -> Any:
    """Adds to a word that other threads add to; gives what it was before."""
    return builder.atomic_rmw("add", pointer(builder, address, I64), count, "seq_cst")


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
