"""The processes of a system under measure: what they take, and their end."""

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import TICKS

_MARK = "KVRELAY_BENCHMARK"
_END_S = 30.0


class _Process(NamedTuple):
    """`started`, in ticks since boot, tells it from a later one of the same number."""

    pid: int
    started: int


class Family:
    """Known by a variable of the environment that they inherit, since a cluster's processes leave
    the session and the parent that they were started by; and by their parents, since a process
    that gives itself a long name writes it over that variable. Once seen, they stay known."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._said = f"{_MARK}={self._id}".encode()
        self._known: set[_Process] = set()

    @property
    def environment(self) -> dict[str, str]:
        return {_MARK: self._id}

    def pss_bytes(self) -> int:
        """What they hold of the machine's memory; a page that several share counts once."""
        return int(sum(self._of_each(_pss_bytes)))

    def cpu_s(self) -> float:
        """Of those that live."""
        return sum(self._of_each(_cpu_s))

    def end(self) -> None:
        """Whoever outlived the process that had started them."""
        deadline = time.monotonic() + _END_S
        while self.look() and time.monotonic() < deadline:
            self._signal(signal.SIGKILL)
            time.sleep(0.05)

    def look(self) -> set[int]:
        """Who lives now. Those whose parent ends between two looks may be lost."""
        parents = dict(_everybody())
        found = {one for one in parents if one in self._known or self._has_mark(one.pid)}
        pids = {one.pid for one in found}
        while more := {one for one, up in parents.items() if up in pids and one not in found}:
            found |= more
            pids |= {one.pid for one in more}
        self._known = found
        return pids

    def _has_mark(self, pid: int) -> bool:
        try:
            return self._said in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False  # another user's, or it has ended meanwhile

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.look():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _of_each(self, read: Callable[[int], float]) -> Iterator[float]:
        for pid in self.look():
            try:
                yield read(pid)
            except (OSError, IndexError):
                continue  # it has ended meanwhile


def _everybody() -> Iterator[tuple[_Process, int]]:
    """With their parents' numbers; without those that have ended and are not waited for yet."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state != "Z":
            yield _Process(int(entry.name), int(rest[17])), int(parent)


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class ForeignCpu:
    """How much of the machine's CPU others took, from its making on. What a process of the
    family took that has ended since counts as others'."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._started = self._now()

    def share(self) -> float:
        machine, own, wall = (
            now - before for now, before in zip(self._now(), self._started, strict=True)
        )
        return max(0.0, machine - own) / (wall * (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float]:
        first, *_ = Path("/proc/stat").read_text().splitlines()
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, first.split()[1:])
        machine = (user + nice + system + irq + softirq) / TICKS
        return machine, self._family.cpu_s() + time.process_time(), time.perf_counter()
