"""A Gloo communicator of two, outside of torch's static groups: any number may live and die."""

import contextlib
import threading
from collections import deque
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from kv_transfer.carrier import End
from kv_transfer.collective_rendezvous import Rendezvous
from kv_transfer.errors import ConnectorUnavailable

_AT_ONCE = timedelta(milliseconds=1)  # none at all would stand for ever
_TAG, _NOBODYS_TAG = 0, 1


class _Posted(NamedTuple):
    work: Any
    data: Tensor  # which must not end before the work


class GlooGroup:
    """One thread owns it; `interrupt` is for any thread.

    Gloo's `abort` is for the whole process and ends nothing that is posted. What does end it is a
    wait that times out: Gloo then closes the group's connections. But whoever waits for a message
    that has arrived in part is told nothing, not even of the peer's death. So a thread of ours
    does, which at worst is left behind until its time is up, with a buffer that nobody writes.
    """

    def __init__(self, end: End, rendezvous: Rendezvous, host: str, form_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._threads = 1
        options._timeout = timedelta(seconds=form_s)
        self._other = 1 - end
        self._lock = threading.Lock()
        self._posted: deque[_Posted] = deque()  # ends in this order
        self._interrupted = False
        try:
            # A listener and a thread of its own, which end with the group.
            options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
            self._group: Any = ProcessGroupGloo(_ControlStore(rendezvous), end, 2, options)
        except RuntimeError as e:
            raise ConnectionError(f"no communicator: {_first_line(e)}") from None
        self._waits: SimpleQueue[tuple[_Posted, timedelta] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[str | None] = SimpleQueue()
        queues = self._waits, self._outcomes
        threading.Thread(target=_wait, args=queues, name="gloo-wait", daemon=True).start()

    def send(self, data: Tensor) -> None:
        """Posts it; the data are Gloo's until `wait` has returned for it."""
        self._post(self._group.send, data)

    def receive(self, data: Tensor) -> None:
        self._post(self._group.recv, data)

    def wait(self, seconds: float) -> None:
        """For what was posted first."""
        with self._lock:
            if self._interrupted:
                raise ConnectionError("interrupted")
            self._waits.put((self._posted[0], max(_AT_ONCE, timedelta(seconds=seconds))))
        problem = self._outcomes.get()
        if problem is not None:
            raise ConnectionError(f"the communicator broke: {problem}")
        with self._lock:
            self._posted.popleft()

    def interrupt(self) -> None:
        """By a wait for what nobody sends: of what was posted it could take the completion from the
        thread that waits for it, which would be left behind."""
        with self._lock:
            self._interrupted = True
            is_idle = not self._posted
        if not is_idle:
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self._group.recv([nothing], self._other, _NOBODYS_TAG).wait(_AT_ONCE)
        self._outcomes.put("interrupted")

    def close(self) -> None:
        """Nothing that was posted is read or written any more when it returns."""
        self.interrupt()
        self._waits.put(None)
        self._posted.clear()
        del self._group

    def _post(self, act: Any, data: Tensor) -> None:
        try:
            work = act([data], self._other, _TAG)
        except RuntimeError as e:
            raise ConnectionError(f"the communicator broke: {_first_line(e)}") from None
        with self._lock:
            self._posted.append(_Posted(work, data))


def _wait(
    waits: "SimpleQueue[tuple[_Posted, timedelta] | None]", outcomes: "SimpleQueue[str | None]"
) -> None:
    """A thread's, which knows the group's queues only: it may outlive the group."""
    while found := waits.get():
        posted, patience = found
        try:
            posted.work.wait(patience)
        except RuntimeError as e:
            outcomes.put(_first_line(e))
        else:
            outcomes.put(None)
        del found, posted


def check_host(host: str) -> None:
    """ConnectorUnavailable where Gloo cannot listen."""
    try:
        ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
    except RuntimeError as e:
        raise ConnectorUnavailable(f"Gloo cannot listen at {host}: {_first_line(e)}") from None


class _ControlStore(Store):
    """What Gloo asks of a store, over the control connection: no port that a stranger could use,
    and the other end's death is noticed at once.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._rendezvous = rendezvous

    def set(self, key: str, value: str | bytes) -> None:
        self._rendezvous.put(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._rendezvous.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._rendezvous.get(key)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
