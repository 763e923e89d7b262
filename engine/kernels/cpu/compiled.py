"""Compiling a kernel once in a process, and once on a machine."""

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import cfunc, types

from engine.kernels.cpu.cache import kept_on_disk
from engine.kernels.cpu.language import Job


@cache
def compiled(function: Callable[[Any], None], element: str) -> Any:
    """Numba's C callback; its `cache_hits` says whether it came from the disk."""
    options = {"error_model": "numpy", "fastmath": {"contract"}}
    with kept_on_disk():
        return cfunc(types.void(Job(element)), cache=True, **options)(function)
