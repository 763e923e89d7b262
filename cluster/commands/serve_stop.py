"""What ends `kvrelay serve`, and that it does end: signals, a lost head, an application that is
gone."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from cluster.commands.console import say
from cluster.commands.signals import ending_signals
from cluster.own_processes import kill_processes
from cluster.status.local_clusters import forget

END_S = 12.0  # after the first Ctrl-C, for everything; what is left then takes a moment to kill
_LEAVE_S = 5.0  # after the second one, to take away what a cluster of others' has of ours
_LOOK_S = 0.05
_INTERRUPTED, LOST = 130, 1  # statuses


class _Flag:
    """An event that a signal's handler may set: a `threading.Event` has a lock, which the thread
    that is interrupted may hold, and it would wait for itself."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def set(self) -> None:
        if not self.is_set():
            os.write(self._writer, b"x")  # which nobody takes out

    def is_set(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1e3))


class Stop:
    """Signals, counted, or the loss of what the cluster cannot do without."""

    def __init__(self) -> None:
        self._first = _Flag()
        self.again = False
        self.lost = False
        self.deleted = False  # the application, by others
        self.serves = False
        self.listen: Callable[[], None] = lambda: None  # for signals

    def begin(self) -> None:
        """Somebody is served, and is to be told when that ends."""
        self.serves = True
        self.listen()

    def note(self, *_: object) -> None:
        self.again = self._first.is_set()
        self._first.set()

    def lose(self) -> None:
        self.lost = True
        self._first.set()

    def delete(self) -> None:
        self.deleted = True
        self._first.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._first.wait(timeout_s)


@contextmanager
def stop_signals(*, while_starting: bool = True) -> Iterator[Stop]:
    """Also that the terminal is gone: HAProxy would stay.

    Without `while_starting` they end this process at once before anybody is served, and the guard
    what it has started: Ray's library has Python's threads wait for up to a quarter of a minute
    meanwhile, and no handler runs. The first process of a container no signal ends that has no
    handler.
    """
    stop = Stop()
    numbers = ending_signals()

    def listen() -> None:
        for number in numbers:
            signal.signal(number, stop.note)

    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    stop.listen = listen
    if while_starting or os.getpid() == 1:
        listen()
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def ended_in_time(stop: Stop, *, is_ours: bool = True) -> Iterator[None]:
    """However long Ray and Serve would take: after the second signal, or when the time since the
    first is over, whatever is left of a cluster of our own is killed, and then this process ends.
    So it is at once where nobody is served yet and Ray has lost its head: each of the steps that
    start a cluster would wait for that in its own way."""
    ended = threading.Event()

    def watch() -> None:
        stop.wait()
        at_once = stop.lost and not stop.serves
        deadline = time.monotonic() + (0 if at_once else END_S)
        while not (ended.is_set() or stop.again or time.monotonic() > deadline):
            ended.wait(_LOOK_S)
        if not ended.wait(0 if is_ours else _LEAVE_S * stop.again):
            _end_at_once(stop, is_ours)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _end_at_once(stop: Stop, is_ours: bool) -> NoReturn:
    kill_processes()
    forget(os.getpid())
    left = "" if is_ours else "; `serve status` shows whether the application is there still"
    try:
        say(f"stopped at once{left}")
    finally:  # whether anybody listens or not
        os._exit(_INTERRUPTED if stop.again else LOST)
