"""Memory in pages of 2 MiB, where the system has them."""

import contextlib
import ctypes
import mmap

_libc = ctypes.CDLL(None, use_errno=True)


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed; a page comes when it is touched.

    Private: what `mmap` takes by itself is shared memory, which has no huge pages unless an
    administrator wants them for that too.
    """
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """For memory from elsewhere that nothing has touched yet; whole pages of it."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        # what a system does not have it refuses, and nothing is lost
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
