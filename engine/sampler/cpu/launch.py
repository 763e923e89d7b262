"""Compiling an entry point, and running it on the threads of the model's kernels."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import cfunc, types

from engine.kernels.cpu.cache import kept_on_disk
from engine.kernels.cpu.kernel import Kernel
from engine.kernels.cpu.language import Job
from engine.kernels.cpu.team import lead_function


class EntryPoint(Kernel):
    """A Kernel over integers that is compiled, and cached, as the sampler needs it."""

    def __init__(self, function: Callable[[Any], None], num_words: int) -> None:
        super().__init__(function, "f32", "q" * num_words)

    def __call__(self, num_threads: int, *words: float) -> None:
        if self._start is None:
            self._code = _code(self._function)
            self._start = lead_function()
        super().__call__(num_threads, *words)


@cache
def _code(function: Callable[[Any], None]) -> int:
    with _kept_on_disk():
        made = cfunc(types.void(Job("f32")), cache=True, error_model="numpy")(function)
    return int(made.address)


@contextmanager
def _kept_on_disk() -> Iterator[None]:
    """In a folder named by the sampler's sources, inside the one that the kernels would use."""
    digest = hashlib.blake2b(digest_size=8)
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(source.read_bytes())
    with kept_on_disk():
        folder = Path(numba.config.CACHE_DIR) / f"sampler-{digest.hexdigest()}"
        numba.config.CACHE_DIR = str(folder)
        yield
