"""Compiling a kernel once in a process, and once on a machine."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from numba import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from engine.kernels.cpu.cache import kept_on_disk
from engine.kernels.cpu.language import Job
from engine.kernels.cpu.pipeline import KernelPipeline

logger = logging.getLogger(__name__)

not_kept: list[str] = []  # what this process has compiled and could not write to the disk


@contextmanager
def compiled_as_a_whole(function: Callable[[Any], None]) -> Iterator[None]:
    """LLVM sees a kernel with all that it calls inside, and nothing before.

    Numba would have every function that is called optimised and translated by itself, with what
    that calls, and so again at every level: a third of the time, for code that nobody runs. What
    comes out is as fast. Parts have no address, so their environments, which only Python's
    objects need, are not told to anyone.

    Nor is garbage collected meanwhile: looking through all that torch and Numba have in memory,
    again and again, took a tenth of the time.
    """

    class Library(JITCodeLibrary):  # type: ignore[misc]
        def _optimize_final_module(self) -> None:
            if self.name == function.__qualname__:
                super()._optimize_final_module()

        def _finalize_final_module(self) -> None:
            if self.name == function.__qualname__:
                super()._finalize_final_module()
            else:
                self._finalized = True

    with global_compiler_lock:
        codegen = cpu_target.target_context.codegen()
        set_env = codegen.set_env

        def set_env_if_there(name: str, env: Any) -> None:
            if codegen._engine.is_symbol_defined(name):
                set_env(name, env)

        codegen._library_class, codegen.set_env = Library, set_env_if_there
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            del codegen._library_class, codegen.set_env


@cache
def compiled(function: Callable[[Any], None], element: str) -> Any:
    """A kernel as Numba's C callback."""
    return callback(function, element, error_model="numpy", fastmath={"contract"})


class Kept(FunctionCache):  # type: ignore[misc]
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Without all that Numba can compile with, which it would load first: 0.2 s of every
        process that only runs what is on the disk. Its runtime is what machine code refers to."""
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)


def callback(function: Callable[[Any], None], element: str, part: str = "", **options: Any) -> Any:
    """Numba's C callback over a job; its `cache_hits` says whether it came from the disk."""
    signature = (Job(element),), types.void

    def made(kept: bool) -> Any:
        found: Any = CFunc(function, signature, {}, options, pipeline_class=KernelPipeline)
        if kept:
            found._cache = Kept(function)
        found.compile()
        return found

    with kept_on_disk(part) as kept:
        try:
            with compiled_as_a_whole(function):
                return made(kept)
        except OSError as error:  # nothing that compiles in memory; the disk may be full
            if not kept:
                raise
            logger.warning("%s is compiled for this process alone: %s", function.__name__, error)
            not_kept.append(function.__name__)
            return made(kept=False)
