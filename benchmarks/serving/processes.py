"""The processes of a system under measure: what they take, and their end."""

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.machine import TICKS

_MARK = "KVRELAY_BENCHMARK"
_END_S = 30.0


class Family:
    """Known by a variable of the environment that they all inherit: a cluster's processes leave
    the session and the parent that they were started by."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._said = f"{_MARK}={self._id}".encode()

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
        while self._pids() and time.monotonic() < deadline:
            self._signal(signal.SIGKILL)
            time.sleep(0.05)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _pids(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self._said in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
        return found

    def _of_each(self, read: Callable[[int], float]) -> Iterator[float]:
        for pid in self._pids():
            try:
                yield read(pid)
            except (OSError, IndexError):
                continue  # it has ended meanwhile


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
