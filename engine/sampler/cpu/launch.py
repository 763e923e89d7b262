"""Compiling an entry point, and running it on the threads of the model's kernels."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from engine.kernels.cpu.compiled import callback
from engine.kernels.cpu.kernel import Kernel


class EntryPoint(Kernel):
    """A Kernel over integers that is compiled, and cached, as the sampler needs it."""

    def __init__(self, function: Callable[[Any], None], num_words: int) -> None:
        super().__init__(function, "f32", "q" * num_words)

    def code(self) -> int:
        return _code(self._function)


@cache
def _code(function: Callable[[Any], None]) -> int:
    return int(callback(function, "f32", cache_part(), error_model="numpy").address)


@cache
def cache_part() -> str:
    """A folder named by the sampler's sources, inside the one that the kernels use."""
    digest = hashlib.blake2b(digest_size=8)
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(source.read_bytes())
    return f"sampler-{digest.hexdigest()}"
