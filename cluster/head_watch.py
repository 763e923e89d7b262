"""The head of a Ray cluster of our own: nothing of the cluster outlives it for long."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import ray

_NEEDED = ("gcs_server", "raylet")
_POLL_S = 0.5


class HeadWatch:
    """Tells `lost` once, in a thread of its own, which of the processes that Ray cannot be without
    has ended, and how. Ray's others look for the GCS for a minute before they end, and HAProxy
    stays."""

    def __init__(self, lost: Callable[[str], None]) -> None:
        self._lost = lost
        self._node: Any = ray._private.worker._global_node
        self._stopped = threading.Event()
        self._is_lost = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Before Ray ends them itself. Whether one was lost."""
        self._stopped.set()
        self._thread.join()
        return self._is_lost

    def _watch(self) -> None:
        while not self._is_lost and not self._stopped.wait(_POLL_S):
            for name, process in self._node.dead_processes():
                if name in _NEEDED and not self._is_lost:
                    self._is_lost = True
                    self._lost(f"Ray's {name} {_how(process.returncode)}")


def _how(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
