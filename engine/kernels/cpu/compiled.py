"""Compiling a kernel once in a process, and once on a machine."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import cfunc, types

from engine.kernels.cpu.cache import kept_on_disk
from engine.kernels.cpu.language import Job

logger = logging.getLogger(__name__)

not_kept: list[str] = []  # what this process has compiled and could not write to the disk


@cache
def compiled(function: Callable[[Any], None], element: str) -> Any:
    """A kernel as Numba's C callback."""
    return callback(function, element, error_model="numpy", fastmath={"contract"})


def callback(function: Callable[[Any], None], element: str, part: str = "", **options: Any) -> Any:
    """Numba's C callback over a job; its `cache_hits` says whether it came from the disk."""
    signature = types.void(Job(element))
    with kept_on_disk(part) as kept:
        try:
            return cfunc(signature, cache=kept, **options)(function)
        except OSError as error:  # nothing that compiles in memory; the disk may be full
            if not kept:
                raise
            logger.warning("%s is compiled for this process alone: %s", function.__name__, error)
            not_kept.append(function.__name__)
            return cfunc(signature, **options)(function)
