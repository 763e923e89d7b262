"""The two ends of a link in one process."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kv_transfer.carrier import End


def both(make: Callable[[End], object]) -> list[Future[object]]:
    """What each end makes, which takes the other."""
    with ThreadPoolExecutor(2) as threads:
        return [threads.submit(make, end) for end in End]
