"""Running a compiled kernel on torch's own threads.

Numba's threading layers bring a second pool of threads: beside torch's OpenMP pool, which spins
while it waits, both fight for the cores, and changing from one to the other costs 7 us. So
kernels are plain C functions here, and torch's OpenMP runtime calls them on its team, as it
does for the matrix products: 2 us from Python and back with two threads.

Every thread of the team gets the same job and claims pieces of it from a shared counter, so
uneven pieces and threads that come late even out.
"""

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types

from engine.kernels.cpu.cache import kept_on_disk
from engine.kernels.cpu.simd import Job

PARALLEL_ELEMENTS = 16384


class Kernel:
    """A function over a job, compiled for one element type at its first call.

    `words` gives the kinds of its words as in `struct`: q an integer, d a float. Calls of one
    Kernel must not overlap: they share the memory of the words.
    """

    def __init__(self, function: Callable[[Any], None], element: str, words: str) -> None:
        self._function = function
        self._element = element
        self._pack = struct.Struct("2q" + words).pack_into
        self._words = ctypes.create_string_buffer(struct.calcsize("2q" + words))
        self._job = ctypes.addressof(self._words)
        self._code = 0

    def __call__(self, num_threads: int, *words: float) -> None:
        code = self._code
        if not code:
            code = self._code = compiled(self._function, self._element).address
        self._pack(self._words, 0, 0, 0, *words)
        run_on_team(code, self._job, num_threads, 0)


def threads_for(num_elements: int) -> int:
    """Waking the team costs 2 us, about what one thread does to so many elements."""
    return torch.get_num_threads() if num_elements >= PARALLEL_ELEMENTS else 1


def share(pieces: int, threads: int) -> int:
    """Pieces in one claim: few claims, but enough of them to even out."""
    return pieces if threads == 1 else max(1, pieces // (4 * threads))


@cache
def compiled(function: Callable[[Any], None], element: str) -> Any:
    """Numba's C callback; `cache_hits` says whether it came from the disk."""
    options = {"error_model": "numpy", "fastmath": {"contract"}}
    with kept_on_disk():
        return cfunc(types.void(Job(element)), cache=True, **options)(function)


def _openmp_entry() -> Any:
    """torch's own OpenMP: looked up among the libraries that libtorch_cpu was linked with."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    entry = library.GOMP_parallel
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry


run_on_team = _openmp_entry()
