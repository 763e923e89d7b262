"""Reads that threads carry out piece by piece."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Generic, TypeVar

from kv_transfer.errors import TransferError

P = TypeVar("P")

_NUM_LOOKED_AT = 8  # of which some may be for other threads


class PieceRead(Generic[P]):
    """A `Read`: threads `take` its pieces and `finish` each of them once nothing writes it.

        waiting piece -> take -> open piece -> finish -> (gone)
        waiting piece -> give_up, or a failed piece -> (gone)

    The read has ended when no piece is left. `take` and `finish` are for any thread.
    """

    def __init__(
        self,
        pieces: Iterable[P],
        num_bytes: int,
        on_end: Callable[["PieceRead[P]"], None] = lambda _: None,
    ) -> None:
        """`on_end` is called on the event loop, just before `ended` is resolved."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._ended.add_done_callback(_look_at)
        self._num_bytes = num_bytes
        self._on_end = on_end
        self._lock = threading.Lock()
        self._waiting = deque(pieces)
        self._num_open = 0
        self._error: TransferError | None = None
        self._stopped = False
        if not self._waiting:
            self._ended.set_result(None)

    @property
    def ended(self) -> asyncio.Future[None]:
        return self._ended

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def stopped(self) -> bool:
        """No piece is wanted any more: the read was given up, or has failed."""
        return self._stopped

    def give_up(self) -> None:
        self.fail(TransferError("given up by the reader"))

    def fail(self, error: TransferError) -> None:
        """Drops the waiting pieces; open ones go on until they are finished."""
        with self._lock:
            if not self._waiting and not self._num_open:
                return
            self._stop(error)
            done = not self._num_open
        if done:
            self._resolve_soon()

    @property
    def has_waiting(self) -> bool:
        """Pieces that nobody has taken."""
        return bool(self._waiting)

    def take(self, may_take: Callable[[P], bool] = lambda _: True) -> P | None:
        """A piece to carry out now; None if all were taken or dropped, or the next few may not
        be."""
        with self._lock:
            for index, piece in enumerate(islice(self._waiting, _NUM_LOOKED_AT)):
                if may_take(piece):
                    del self._waiting[index]
                    self._num_open += 1
                    return piece
            return None

    def finish(self, error: TransferError | None = None) -> None:
        """One taken piece has ended: nothing of it writes any more."""
        with self._lock:
            self._num_open -= 1
            if error:
                self._stop(error)
            done = not self._num_open and not self._waiting
        if done:
            self._resolve_soon()

    def _stop(self, error: TransferError) -> None:
        self._stopped = True
        self._error = self._error or error
        self._waiting.clear()

    def _resolve_soon(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:  # the loop is closed: nobody waits any more
            assert self._loop.is_closed()

    def _resolve(self) -> None:
        self._on_end(self)
        if self._ended.done():  # cancelled by who waited
            return
        if self._error:
            self._ended.set_exception(self._error)
        else:
            self._ended.set_result(None)


def failed_read(error: TransferError) -> PieceRead[None]:
    """A read that is refused before it begins."""
    read: PieceRead[None] = PieceRead([None], 0)
    read.fail(error)
    return read


class Backlog(Generic[P]):
    """Reads with pieces left; their pieces are taken in turn, so that a long read delays no
    short one for long. For any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reads: deque[PieceRead[P]] = deque()
        self._closed = False

    def put(self, read: PieceRead[P]) -> None:
        with self._changed:
            closed = self._closed
            if not closed:
                self._reads.append(read)
                self._changed.notify_all()
        if closed:
            read.fail(TransferError("closed"))

    def take(self, may_take: Callable[[P], bool] = lambda _: True) -> tuple[PieceRead[P], P] | None:
        """The next piece, if there is one that may be taken."""
        with self._changed:
            return self._next(may_take)

    def wait(self) -> tuple[PieceRead[P], P] | None:
        """The next piece, as soon as there is one; None when the backlog is closed."""
        with self._changed:
            while True:
                found = self._next(lambda _: True)
                if found or self._closed:
                    return found
                self._changed.wait()

    def end(self) -> None:
        """Takes nothing new; what is there is still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Reads lose the pieces that nobody took."""
        with self._changed:
            self._closed = True
            reads, self._reads = self._reads, deque()
            self._changed.notify_all()
        for read in reads:
            read.fail(TransferError("closed"))

    def _next(self, may_take: Callable[[P], bool]) -> tuple[PieceRead[P], P] | None:
        for _ in range(len(self._reads)):
            read = self._reads.popleft()
            piece = read.take(may_take)
            if piece is not None or read.has_waiting:
                self._reads.append(read)
            if piece is not None:
                return read, piece
        return None


def _look_at(future: asyncio.Future[None]) -> None:
    """A failure that nobody waits for is no news: the blocks were given up before."""
    if not future.cancelled():
        future.exception()
