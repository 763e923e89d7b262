"""A compiled kernel as Python calls it."""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.cpu.compiled import compiled
from engine.kernels.cpu.emit import LINE_BYTES
from engine.kernels.cpu.memory import OWN_WORDS
from engine.kernels.cpu.recording import Call, current_recorder
from engine.kernels.cpu.team import TEAM, lead_function

# To hand work over, in a replay too, takes about as long as one thread needs for half of so many.
PARALLEL_ELEMENTS = 65536


class Kernel:
    """A function over a job, compiled for one element type at its first call.

    `words` gives the kinds of its words as in `struct`: q an integer, d a float. `stored` says
    how what is read lies in memory, where not as elements: a quantised cache's format, or short
    weights. Calls of one Kernel must not overlap: they share the
    memory of the words.
    """

    def __init__(
        self, function: Callable[[Any], None], element: str, words: str, stored: str = ""
    ) -> None:
        self._function = function
        self._element = f"{element}+{stored}" if stored else element
        self._layout = struct.Struct(f"{OWN_WORDS}q" + words)
        self._pack = self._layout.pack_into
        self._words = ctypes.create_string_buffer(self._layout.size)
        self._job = ctypes.addressof(self._words)
        self._code = 0
        self._start: Any = None

    def code(self) -> int:
        """The address of the machine code, which is compiled if this process has none yet."""
        return int(compiled(self._function, self._element).address)

    def __call__(self, num_threads: int, *words: float) -> None:
        if self._start is None:
            self._code = self.code()
            self._start = lead_function()
        recorder = current_recorder()
        if recorder is not None:
            recorder.calls.append(Call(self._code, num_threads, self._layout, words))
            if recorder.defers:
                return
        workers = TEAM.take(num_threads - 1)
        try:
            self._pack(self._words, 0, 0, 0, TEAM.address, self._code, workers, *words)
            self._start(self._job)
        finally:
            if workers:
                TEAM.give_back()


class WorkingMemory:
    """Grows, and keeps what it has outgrown: recorded calls go on using that."""

    def __init__(self) -> None:
        self._pieces: list[npt.NDArray[np.uint8]] = []
        self._address, self._size = 0, 0

    def address(self, num_bytes: int) -> int:
        if num_bytes > self._size:
            self._size = max(num_bytes, 2 * self._size)
            memory = np.zeros(self._size + LINE_BYTES, np.uint8)
            self._pieces.append(memory)
            self._address = -(-memory.ctypes.data // LINE_BYTES) * LINE_BYTES
        return self._address


def threads_for(num_elements: int) -> int:
    """One for work so small that waking the team would take longer."""
    return torch.get_num_threads() if num_elements >= PARALLEL_ELEMENTS else 1


def share(pieces: int, threads: int) -> int:
    """Pieces in one claim: few claims, but enough of them to even out."""
    return pieces if threads == 1 else max(1, pieces // (4 * threads))
