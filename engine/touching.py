"""Having a cache's memory made ready while the engine starts and works."""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence

from engine.memory import format_bytes
from kv_cache.slab import KvSlab

logger = logging.getLogger(__name__)

_LAST = 19  # of all nicenesses


def touch_in_background(slabs: Sequence[KvSlab], closing: threading.Event) -> threading.Thread:
    """From the start on, since the first touch of memory may be slower than a prompt; where the
    cores are few, after all else that wants them.

    The thread ends before the interpreter does, also where no engine was closed: it may hold
    the last references to the slabs, and a tensor over foreign memory that is freed while the
    interpreter goes aborts the process.
    """
    thread = threading.Thread(target=_touch, args=(slabs, closing), name="touch-cache", daemon=True)

    def end() -> None:
        closing.set()
        thread.join()

    thread.start()
    atexit.register(end)
    return thread


def _touch(slabs: Sequence[KvSlab], closing: threading.Event) -> None:
    started = time.monotonic()
    if sys.platform == "linux":  # where a niceness may be one thread's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST)
    if all(slab.touch(closing.is_set) for slab in slabs) and not closing.is_set():
        size = format_bytes(sum(slab.data.nbytes for slab in slabs))
        logger.info("%s of cache touched in %.1f s", size, time.monotonic() - started)
