"""Calls that were recorded, run again as one.

Between two calls of a step Python takes some 5 us, and far more where the weights that passed
by have driven it out of the caches. A replay is one call: the threads go from job to job by
themselves, and other Python threads have the interpreter meanwhile.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.kernels.cpu.emit import LINE_BYTES
from engine.kernels.cpu.kernel import Kernel
from engine.kernels.cpu.memory import CODE_WORD, OWN_WORDS, int64_at, word
from engine.kernels.cpu.recording import Call
from engine.kernels.cpu.sync import atomic_add, atomic_load, give_way, pause, run_code
from engine.kernels.cpu.team import SPINS

WORDS = "3q"
INSIDE = 2 * 8  # where a job that stands alone has its team's mailbox: the threads in it now


def chain(job: Any) -> None:
    """Every thread goes through all jobs in turn, and enters one when the one before is done:
    its pieces are all claimed, or nobody would have left it, and nobody is inside."""
    jobs, count, job_bytes = word(job, 0), word(job, 1), word(job, 2)
    for i in range(count):
        start = jobs + i * job_bytes
        atomic_add(start + INSIDE, 1)
        run_code(int64_at(start + CODE_WORD * 8), start)
        atomic_add(start + INSIDE, -1)
        turns = 0
        while atomic_load(start + INSIDE) != 0:
            turns += 1
            if turns < SPINS:
                pause()
            else:
                give_way()


class Replay:
    """The memory that the calls use must outlive it; what they wrote there is overwritten."""

    def __init__(self, run: Kernel, calls: Sequence[Call]) -> None:
        run.code()  # loaded now, not when it is first wanted
        self._run = run
        self._num_threads = max(call.num_threads for call in calls)
        job_bytes = -(-max(call.layout.size for call in calls) // LINE_BYTES) * LINE_BYTES
        memory = np.zeros(len(calls) * job_bytes + LINE_BYTES, np.uint8)
        start = -memory.ctypes.data % LINE_BYTES
        for i, call in enumerate(calls):
            at = start + i * job_bytes
            call.layout.pack_into(memory.data, at, 0, 0, 0, call.code, 0, *call.words)
        jobs = memory[start : start + len(calls) * job_bytes].view(np.int64)
        # Pieces claimed, threads numbered, threads inside: what a run leaves behind.
        self._used = jobs.reshape(len(calls), -1)[:, :CODE_WORD]
        self._words = jobs.ctypes.data, len(calls), job_bytes

    def __call__(self) -> None:
        self._used[:] = 0
        self._run(self._num_threads, *self._words)


assert INSIDE // 8 < CODE_WORD < OWN_WORDS
