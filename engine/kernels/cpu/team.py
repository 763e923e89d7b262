"""Threads that run one job together, and cost nothing while there is none.

    caller                                     worker (asleep, or looking for SPINS turns)
    posts the job and opens its seats   ----►  takes a seat, runs the job
    runs the job itself                        leaves
    closes the seats that are left
    waits for the workers that took one

Every runner claims pieces of the job until none are left, so the caller never waits for a
worker that has not woken up. OpenMP's teams do wait, which is ruinous where cores are shared:
with as many busy processes beside it as cores, a region of 2 us took up to 7 ms on average.
Workers sleep after some dozen microseconds without work, so two processes on one machine can
each have all its cores while the other one is idle.
"""

import atexit
import ctypes
import os
import sys
from functools import cache
from threading import Lock, Thread
from typing import Any

from engine.kernels.cpu.compiled import compiled
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.memory import (
    CODE_WORD,
    MAILBOX_WORD,
    OWN_WORDS,
    SEATS_WORD,
    address_of,
    int64_at,
    put_int64,
)
from engine.kernels.cpu.sync import (
    atomic_add,
    atomic_load,
    atomic_store,
    compare_and_swap,
    give_way,
    pause,
    run_code,
    sleep_while,
    wake,
)

# A mailbox has three cache lines: the state, the job, and how many are asleep. The state is
# generation << 32 | open seats << 16 | workers inside; workers sleep on its upper half, and a
# caller that waits for them on its lower one (x86 and ARM are little-endian). Code 0 tells
# workers to end.
CODE, JOB, SLEEPERS, CALLERS_ASLEEP, MAILBOX_BYTES = 64, 72, 128, 136, 192
GENERATION, SEAT = 1 << 32, 1 << 16
UPPER_HALF = 4
LAST_GENERATION = 0x7FFFFFFF
SPINS = 2000  # 50 us on Zen 5; calls within a step follow each other in less than 10
YIELDS = 100  # while somebody else may only need a moment


def lead(job: Any) -> None:
    """What the caller does."""
    start = address_of(job)
    code = int64_at(start + CODE_WORD * 8)
    seats = int64_at(start + SEATS_WORD * 8)
    if seats == 0:
        run_code(code, start)
        return
    mailbox = int64_at(start + MAILBOX_WORD * 8)
    put_int64(mailbox + CODE, code)
    put_int64(mailbox + JOB, start)
    generation = (atomic_load(mailbox) // GENERATION + 1) & LAST_GENERATION
    atomic_store(mailbox, generation * GENERATION + seats * SEAT)
    if atomic_load(mailbox + SLEEPERS) > 0:
        wake(mailbox + UPPER_HALF, seats)
    if code == 0:
        return  # a seat is kept for each, however late it wakes up
    run_code(code, start)
    state = atomic_load(mailbox)
    while not compare_and_swap(mailbox, state, generation * GENERATION + state % SEAT):
        state = atomic_load(mailbox)
    turns = 0
    state = atomic_load(mailbox)
    while state % SEAT != 0:
        turns += 1
        wait_a_turn(turns, mailbox, state % GENERATION, mailbox + CALLERS_ASLEEP)
        state = atomic_load(mailbox)


def serve(job: Any) -> None:
    """What a worker does until it is told to end; `job` is the mailbox."""
    mailbox = address_of(job)
    seen = 0
    while True:
        seen = next_generation(mailbox, seen)
        state = atomic_load(mailbox)
        while state // GENERATION == seen and state // SEAT % SEAT > 0:
            if compare_and_swap(mailbox, state, state - SEAT + 1):
                code, posted = int64_at(mailbox + CODE), int64_at(mailbox + JOB)
                if code != 0:
                    run_code(code, posted)
                atomic_add(mailbox, -1)
                if atomic_load(mailbox + CALLERS_ASLEEP) > 0:
                    wake(mailbox, 1)
                if code == 0:
                    return
                break
            state = atomic_load(mailbox)


@part_of_kernel
def next_generation(mailbox: Any, seen: Any) -> Any:
    for _ in range(SPINS):
        if atomic_load(mailbox) // GENERATION != seen:
            return atomic_load(mailbox) // GENERATION
        pause()
    while atomic_load(mailbox) // GENERATION == seen:
        atomic_add(mailbox + SLEEPERS, 1)
        sleep_while(mailbox + UPPER_HALF, seen)
        atomic_add(mailbox + SLEEPERS, -1)
    return atomic_load(mailbox) // GENERATION


@part_of_kernel
def wait_a_turn(turns: Any, address: Any, seen: Any, sleepers: Any) -> Any:
    """For another thread to change the lower half of a word from what was seen; `sleepers`, an
    address, tells it whether anybody is to be woken then. A thread that takes long has lost its
    core to another process. It is given this one once nothing can run here, and who only gives way
    can always run."""
    if turns < SPINS:
        pause()
    elif turns < SPINS + YIELDS:
        give_way()
    else:
        atomic_add(sleepers, 1)
        sleep_while(address, seen)
        atomic_add(sleepers, -1)


class Team:
    """The workers of a process: one job at a time, and who finds it taken runs alone."""

    def __init__(self) -> None:
        self._mailbox = ctypes.create_string_buffer(MAILBOX_BYTES + 64)
        self.address = ctypes.addressof(self._mailbox) + 63 & ~63
        self._busy = Lock()
        self._workers: list[Thread] = []

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def take(self, num_workers: int) -> int:
        """How many workers the caller may use; if any, it says when it is done with them."""
        if num_workers < 1 or not CAN_SLEEP or not self._busy.acquire(blocking=False):
            return 0
        try:
            while len(self._workers) < num_workers:
                self._add_worker()
        except BaseException:
            self._busy.release()
            raise
        return num_workers

    def give_back(self) -> None:
        self._busy.release()

    def _add_worker(self) -> None:
        name = f"kernels-{len(self._workers)}"
        worker = Thread(target=serve_function(), args=(self.address,), name=name, daemon=True)
        worker.start()
        self._workers.append(worker)

    def close(self) -> None:
        """Ends the workers: code that still runs must not outlive the interpreter."""
        stop = (ctypes.c_int64 * OWN_WORDS)()
        stop[MAILBOX_WORD], stop[SEATS_WORD] = self.address, len(self._workers)
        with self._busy:
            if self._workers:
                lead_function()(ctypes.addressof(stop))
            for worker in self._workers:
                worker.join()
            self._workers.clear()

    def forget(self) -> None:
        """A forked child has the memory, but none of the threads."""
        ctypes.memset(self.address, 0, MAILBOX_BYTES)
        self._busy = Lock()
        self._workers.clear()


@cache
def lead_function() -> Any:
    return C_FUNCTION(compiled(lead, "f32").address)


@cache
def serve_function() -> Any:
    return C_FUNCTION(compiled(serve, "f32").address)


C_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CAN_SLEEP = sys.platform == "linux"  # by futexes; elsewhere every job runs alone
TEAM = Team()
atexit.register(TEAM.close)
os.register_at_fork(after_in_child=TEAM.forget)
