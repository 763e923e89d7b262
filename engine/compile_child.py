"""Processes that compile kernels for others to load, see compile_ahead.py.

They are forked from one that has imported what they need, torch most of all, for which each would
take 3 s of CPU time. Every kernel has a lock, a byte of a file: whoever comes first compiles it, be
it another child of the same engine or one of an engine that starts beside it. The locks of a
process that is killed are free again.
"""

import fcntl
import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO

Compilation = Callable[[], object]


def main(dtype_name: str, kv_format: str, lock: str, num_forks: int) -> None:
    """Each fork sees to every kernel, so one that gets through is enough."""
    compilations = _compilations(dtype_name, kv_format)
    gc.freeze()  # so that pages stay shared
    forks = []
    for _ in range(num_forks):
        pid = os.fork()
        if not pid:
            _compile(compilations, lock)
            return
        forks.append(pid)
    _watch_parent()
    statuses = [os.waitpid(pid, 0)[1] for pid in forks]
    if all(statuses):
        sys.exit(1)


def _compile(compilations: Sequence[Compilation], lock: str) -> None:
    _watch_parent()
    with open(lock, "ab") as file:
        compile_shared(compilations, file)


def _watch_parent() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def compile_shared(compilations: Sequence[Compilation], locks: IO[bytes]) -> None:
    """What others have at the moment comes last: done by then, or left undone by their end."""
    taken = []
    for number, compile_one in enumerate(compilations):
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):  # systems differ
            taken.append(number)
            continue
        compile_one()
        fcntl.lockf(locks, fcntl.LOCK_UN, 1, number)
    for number in taken:
        fcntl.lockf(locks, fcntl.LOCK_EX, 1, number)
        compilations[number]()
        fcntl.lockf(locks, fcntl.LOCK_UN, 1, number)


def _compilations(dtype_name: str, kv_format: str) -> list[Compilation]:
    """Short ones first, which show whether the disk takes them, then the longest."""
    import torch
    from numba.core.registry import cpu_target

    from engine.kernels.cpu.kernels import CpuKernels
    from engine.kernels.cpu.team import lead_function, serve_function
    from engine.sampler.cpu.sampler import EntryPoints
    from kv_cache.layout import KV_FORMATS

    cpu_target.typing_context.refresh()  # what numba loads when it compiles first
    cpu_target.target_context.refresh()
    dtype = getattr(torch, dtype_name)

    def sampler() -> None:  # much is common to its two kernels, and compiled once by one process
        for entry_point in EntryPoints.of(dtype):
            entry_point.code()

    compilations: list[Compilation] = [lead_function, serve_function, sampler]
    compilations += [kernel.code for kernel in CpuKernels().used_for(dtype, KV_FORMATS[kv_format])]
    return [partial(_keep, compile_one) for compile_one in compilations]


def _keep(compile_one: Compilation) -> None:
    """Loads what is on the disk already."""
    from engine.kernels.cpu.kept import not_kept

    compile_one()
    if not_kept:
        sys.exit(f"{not_kept[0]} cannot be kept on the disk")
