"""What the measures were taken on, and who else was at work there."""

import os
import platform
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
GIB = 1 << 30


def cores() -> list[int]:
    """The cores this process may use, by number."""
    return sorted(os.sched_getaffinity(0))


def describe() -> dict[str, str | int | float]:
    cpu = next(
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "cores": len(cores()),
        "memory_gib": round(memory / GIB, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


class CpuTime(NamedTuple):
    """Seconds of CPU since some moment: of the whole machine, and of the processes given."""

    machine_s: float
    own_s: float

    @classmethod
    def now(cls, sessions: set[int]) -> "CpuTime":
        """`sessions` are the session ids of our children; this process counts too."""
        first, *_ = Path("/proc/stat").read_text().splitlines()
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, first.split()[1:])
        own = sum(os.times()[:4])
        for process in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = process.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) in sessions:
                own += (int(fields[11]) + int(fields[12])) / TICKS
        return cls((user + nice + system + irq + softirq) / TICKS, own)

    def foreign_since(self, earlier: "CpuTime") -> float:
        """Seconds of CPU that others took; below zero by a tick or two when none did."""
        return (self.machine_s - earlier.machine_s) - (self.own_s - earlier.own_s)
