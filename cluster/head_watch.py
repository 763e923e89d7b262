"""The head of a Ray cluster of our own: nothing of the cluster outlives it for long."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

_NEEDED = ("gcs_server", "raylet")
_POLL_S = 0.5
# Ray's library ends this process, with words of its own, if the raylet is lost while it connects: a
# loss just before that is to be seen in time.
_STARTING_POLL_S = 0.1


class HeadWatch:
    """Tells `lost` once, in a thread of its own or in that of `stop`, which of the processes that
    Ray cannot be without has ended, and how. Ray itself would wait: for half a minute or a whole
    one before `ray.init` gives up or ends this process, for a minute before its other processes
    end, and HAProxy stays."""

    def __init__(self, lost: Callable[[str], None]) -> None:
        self._lost = lost
        self._stopped = threading.Event()
        self._is_lost = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Before Ray ends them itself. Whether one was lost."""
        self._stopped.set()
        self._thread.join()
        self._look()
        return self._is_lost

    def _watch(self) -> None:
        while not self._is_lost:
            if self._stopped.wait(_POLL_S if ray.is_initialized() else _STARTING_POLL_S):
                return
            self._look()

    def _look(self) -> None:
        for name, how in _ended():
            if name in _NEEDED and not self._is_lost:
                self._is_lost = True
                self._lost(f"Ray's {name} {how}")


def _ended() -> Iterator[tuple[str, str]]:
    """Processes of Ray's by their names, and how they ended."""
    node: Any = ray._private.worker._global_node
    if node is None:  # until all of them are there
        yield from _ended_children()
        return
    for name, process in node.dead_processes():
        yield name, _how(process.returncode)


def _ended_children() -> Iterator[tuple[str, str]]:
    """That nobody has waited for yet, which is left to Ray."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # Names are any bytes, of processes that are none of ours, too.
            words, _, rest = (entry / "stat").read_bytes().rpartition(b")")
            state, parent = rest.split()[:2]
            if state != b"Z" or int(parent) != os.getpid():
                continue
            seen = os.waitid(os.P_PID, int(entry.name), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            continue  # it has ended meanwhile, or Ray has waited for it
        if seen is not None:
            is_exit = seen.si_code == os.CLD_EXITED
            name = os.fsdecode(words.partition(b"(")[2])
            yield name, _how(seen.si_status if is_exit else -seen.si_status)


def _how(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
