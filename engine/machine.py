"""What this machine has to offer: memory and threads, as a container sees them."""

import os
import resource
from math import ceil, inf
from pathlib import Path

from engine.control_groups import ControlGroups

GROUPS = ControlGroups()


def available_memory(groups: ControlGroups = GROUPS) -> int:
    """Bytes that this process may still take: what the kernel calls available, or what is left
    of its control groups' limits or of its address space, whichever is least."""
    left = min(_meminfo()["MemAvailable"], groups.memory_left(), _address_space_left())
    return max(int(left), 0)


def num_cpus(groups: ControlGroups = GROUPS) -> int:
    """Cores that this process may keep busy. More threads than its quota pays for would all
    stand still for the rest of a period, whoever waits for whom."""
    cores = len(os.sched_getaffinity(0))
    return max(1, ceil(min(cores, groups.num_cpus())))


def _address_space_left() -> float:
    """`ulimit -v`, as batch systems have it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return inf
    taken = int(Path("/proc/self/statm").read_text().split()[0])
    return limit - taken * resource.getpagesize()


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {k: int(v.split()[0]) * 1024 for k, v in (line.split(":", 1) for line in lines)}
