"""Compiling a kernel once in a process, and once on a machine."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from numba import types
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from engine.kernels.cpu.cache import cache_directory, cache_home
from engine.kernels.cpu.kept import Kept
from engine.kernels.cpu.language import Job
from engine.kernels.cpu.pipeline import KernelPipeline


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


def callback(function: Callable[[Any], None], element: str, part: str = "", **options: Any) -> Any:
    """Numba's C callback over a job, kept in `part` of our folder; its `cache_hits` says whether
    it came from there."""
    signature = (Job(element),), types.void
    made: Any = CFunc(function, signature, {}, options, pipeline_class=KernelPipeline)
    home = cache_home()
    if home is not None:
        made._cache = Kept(cache_directory(home) / part, function, element)
    with compiled_as_a_whole(function):
        made.compile()
    return made
