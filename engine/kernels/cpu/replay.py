"""Calls that were recorded, run again as one.

Between two calls of a step Python takes some 5 us, and far more where the weights that passed
by have driven it out of the caches. A replay is one call: the threads go from job to job by
themselves, and other Python threads have the interpreter meanwhile.

Jobs for which one thread is enough are left to the first that comes to them, together with those
of the kind that follow: handing one over takes about as long as it does.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from engine.kernels.cpu.emit import LINE_BYTES
from engine.kernels.cpu.kernel import Kernel
from engine.kernels.cpu.memory import CODE_WORD, MAILBOX_WORD, int64_at, word
from engine.kernels.cpu.recording import Call
from engine.kernels.cpu.sync import atomic_add, atomic_load, atomic_store, run_code, wake
from engine.kernels.cpu.team import wait_a_turn

WORDS = "3q"
# Of how many jobs, from here on, one thread takes care; 0: all do, of this one. A job that is
# called by itself has its team's mailbox there.
ONES_WORD = MAILBOX_WORD
# Threads meet in a line behind the job: whoever waited in the job's own would take that away from
# those at work, again and again.
UNFINISHED, COMERS, ASLEEP = 0, 8, 16
EVERYBODY = 1 << 20


def chain(job: Any) -> None:
    """Every thread goes through all jobs in turn. It goes past one that is everybody's when that is
    done: its pieces are all claimed, or nobody would have left it, and nobody is inside. Those of
    one thread, which are unfinished from the start, are so until the first that came has run
    them. Whoever ends one wakes those who sleep. Who comes to one that is done finds nothing to
    claim there, and before they have claimed a piece kernels write nothing: the memory of that
    thread's number may be another's by then."""
    jobs, count, job_bytes = word(job, 0), word(job, 1), word(job, 2)
    i = 0
    while i < count:
        start = jobs + i * job_bytes
        meeting = start + job_bytes - LINE_BYTES
        ones, is_done = int64_at(start + ONES_WORD * 8), False
        if ones == 0:
            atomic_add(meeting + UNFINISHED, 1)
            run_code(int64_at(start + CODE_WORD * 8), start)
            is_done = atomic_add(meeting + UNFINISHED, -1) == 1
        elif atomic_add(meeting + COMERS, 1) == 0:
            for k in range(ones):
                own = start + k * job_bytes
                run_code(int64_at(own + CODE_WORD * 8), own)
            atomic_store(meeting + UNFINISHED, 0)
            is_done = True
        if is_done and atomic_load(meeting + ASLEEP) > 0:
            wake(meeting + UNFINISHED, EVERYBODY)
        i += max(ones, 1)
        turns = 0
        unfinished = atomic_load(meeting + UNFINISHED)
        while unfinished != 0:
            turns += 1
            wait_a_turn(turns, meeting + UNFINISHED, unfinished, meeting + ASLEEP)
            unfinished = atomic_load(meeting + UNFINISHED)


class Replay:
    """The memory that the calls use must outlive it; what they wrote there is overwritten."""

    def __init__(self, run: Kernel, calls: Sequence[Call]) -> None:
        run.code()  # loaded now, not when it is first wanted
        self._run = run
        self._num_threads = max(call.num_threads for call in calls)
        ones = _num_ones(calls)
        job_bytes = -(-max(call.layout.size for call in calls) // LINE_BYTES) * LINE_BYTES
        job_bytes += LINE_BYTES  # where threads meet
        memory = np.zeros(len(calls) * job_bytes + LINE_BYTES, np.uint8)
        start = -memory.ctypes.data % LINE_BYTES
        for i, call in enumerate(calls):
            at = start + i * job_bytes
            call.layout.pack_into(memory.data, at, 0, 0, ones[i], call.code, 0, *call.words)
        self._jobs = memory[start : start + len(calls) * job_bytes].view(np.int64)
        meetings = self._jobs.reshape(len(calls), -1)[:, -LINE_BYTES // 8 :]
        meetings[:, UNFINISHED // 8] = np.array(ones) > 0
        self._unused = self._jobs.copy()
        self._words = self._jobs.ctypes.data, len(calls), job_bytes

    def __call__(self) -> None:
        self._jobs[:] = self._unused  # pieces and threads were counted in it
        self._run(self._num_threads, *self._words)


def _num_ones(calls: Sequence[Call]) -> list[int]:
    """For the first of some calls in a row that take one thread, how many they are."""
    numbers = []
    for of_one, row in groupby(calls, lambda call: call.num_threads == 1):
        length = len(list(row))
        numbers += [length] + [0] * (length - 1) if of_one else [0] * length
    return numbers
