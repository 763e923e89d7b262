"""A kernel's machine code in a file of its own.

Numba keeps an index of a function's versions beside them, which it trusts and which nobody locks:
what a crash leaves of it ends every later start, and of two unlike CPUs that compile at once one
finds the other's code under its name. Here the name of a file says all that decides what is in
it, and a digest in front whether it is all there.
"""

import hashlib
import logging
import os
import pickle
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16

not_kept: list[str] = []  # what this process has compiled and could not write to the disk


class Kept:
    """What Numba's callbacks take for a cache: one file, whatever they compile."""

    def __init__(self, folder: Path, function: Callable[[Any], None], element: str) -> None:
        self._name = function.__name__
        module = function.__module__.rpartition(".")[2]
        self.file = folder / f"{module}.{self._name}-{element}-{this_cpu()}.code"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Without all that Numba can compile with, which takes 0.2 s of every process that only
        runs what is on the disk. Its runtime is what machine code refers to."""
        rtsys.initialize(target_context)
        pickled = self._read()
        if pickled is None:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(pickled))

    def save_overload(self, signature: Any, compiled: Any) -> None:
        try:
            self._write(dumps(compiled._reduce()))
        except OSError as error:  # the disk may be full
            logger.warning("%s is compiled for this process alone: %s", self._name, error)
            not_kept.append(self._name)

    def _read(self) -> bytes | None:
        try:
            content = self.file.read_bytes()
        except OSError:
            return None
        pickled = content[DIGEST_BYTES:]
        return pickled if content[:DIGEST_BYTES] == _digest(pickled) else None

    def _write(self, pickled: bytes) -> None:
        """As a whole or not at all, also where another process writes it, too."""
        folder = self.file.parent
        folder.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(_digest(pickled) + pickled)
            Path(name).replace(self.file)
        except OSError:
            with suppress(OSError):
                Path(name).unlink()
            raise


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


@cache
def this_cpu() -> str:
    """What is compiled for: homes are shared by unlike machines."""
    target = repr(cpu_target.target_context.codegen().magic_tuple())
    return hashlib.blake2b(target.encode(), digest_size=8).hexdigest()
