"""Whether this system backs memory that it is told to, and how much of a process has it, asked
beside the code under test."""

import mmap
import os
from pathlib import Path

MADV_POPULATE_WRITE = 23  # Linux 5.14


def may_populate() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def resident_bytes() -> int:
    """What this process holds in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
