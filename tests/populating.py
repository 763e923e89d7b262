"""Whether this system backs memory that it is told to, asked beside the code under test."""

import mmap

MADV_POPULATE_WRITE = 23  # Linux 5.14


def may_populate() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True
