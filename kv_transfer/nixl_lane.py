"""The thread that owns an agent: it posts READs, polls them, and lets peers connect."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from kv_transfer.block_pairs import BlockPairs
from kv_transfer.connector import PoolRegion
from kv_transfer.errors import LinkLost, OneSidedRefused, TransferError
from kv_transfer.faults import BREAK, POSTED, READ, Faults
from kv_transfer.nixl import Agent, ReadRefused, RemoteName, Transfer
from kv_transfer.piece_read import Backlog, PieceRead

T = TypeVar("T")

MAX_POST_BYTES = 32 << 20  # a post over CMA copies before it returns, and nobody is served
_MAX_OPEN = 4  # of a peer's posts in flight: its link is kept full, and they are given up soon
_MAX_KEPT = 256  # connections without a link; those to who is dead hold some memory
_SPIN_S = 200e-6  # a READ that takes longer costs no core, only some 0.1 ms more
_NAP_S = 50e-6
_CLOSE_S = 1.0
_NO_WAY = "no way to read without the holder's help"

# Agents that were closed with a READ in flight. It may write to our memory to the process's end.
_abandoned: list[object] = []


class Piece(NamedTuple):
    peer: "SharedPeer"
    pairs: BlockPairs
    lane: "Lane | None" = None  # which alone may carry it out


class SharedPeer:
    """A peer as the event loop and the lanes know it."""

    def __init__(self, metadata: bytes, regions: Sequence[PoolRegion], anew: bool = False) -> None:
        """`anew`: not over a connection that is there."""
        self.metadata = metadata
        self.regions = tuple(regions)
        self.anew = anew
        self.was_read = False  # a READ has succeeded


@dataclass(slots=True, eq=False)
class _Connection:
    name: RemoteName
    blocks: dict[int, Any] = field(default_factory=dict)  # prepared, by group
    was_used: bool = False  # a READ was posted
    refused: bool = False  # the first one


class _Open(NamedTuple):
    transfer: Transfer
    read: PieceRead[Piece]
    piece: Piece


class Lane:
    """One agent and its thread. Other threads only hand it work.

    It sleeps `period_s` when nothing is in flight, unless it is to hurry; peers that connect to
    it wait a few periods.
    """

    def __init__(
        self,
        name: str,
        regions: Sequence[PoolRegion],
        backlog: Backlog[Piece],
        period_s: float,
        faults: Faults,
    ) -> None:
        self.metadata: Future[bytes] = Future()  # of the agent, as soon as there is one
        self._period_s = period_s
        self._hurried_period_s = period_s
        self._hurried_until = 0.0
        self._regions = tuple(regions)
        self._backlog = backlog
        self._faults = faults
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._peers: dict[SharedPeer, _Connection] = {}
        self._kept: dict[bytes, _Connection] = {}  # without a link, by metadata, the oldest first
        self._open: list[_Open] = []
        self._posted = False  # in the last turn; then there may be more
        self._last_post = 0.0
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_dead(self) -> bool:
        """Its thread has ended, and nobody had asked for that."""
        return self._stop_at is None and not self._thread.is_alive()

    def wake(self) -> None:
        self._inbox.put(None)

    def hurry(self, period_s: float, seconds: float) -> None:
        """Sleeps `period_s` for so long."""
        self._hurried_period_s = period_s
        self._hurried_until = time.monotonic() + seconds
        self.wake()

    def add_peer(self, peer: SharedPeer) -> Future[bool]:
        """Whether over a connection that was there, and may have failed since its last READ."""
        return self._ask(lambda: self._add_peer(peer))

    def remove_peer(self, peer: SharedPeer) -> Future[None]:
        """Only when no read of that peer is left."""
        return self._ask(lambda: self._remove_peer(peer))

    def close(self) -> Future[None]:
        """Done when the thread is about to end; call it after the backlog is closed."""
        return self._ask(self._stop)

    def join(self) -> None:
        self._thread.join()

    def _ask(self, work: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        if self.is_dead:
            answer.set_exception(TransferError("the lane's thread has failed"))
            return answer

        def do() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except TransferError as e:
                answer.set_exception(e)

        self._inbox.put(do)
        return answer

    def _run(self) -> None:
        if not self.metadata.set_running_or_notify_cancel():
            return
        try:
            self._agent = Agent(self._regions)
        except TransferError as e:
            self.metadata.set_exception(e)
            return
        except BaseException as e:
            self.metadata.set_exception(e)
            raise
        self.metadata.set_result(self._agent.metadata())
        try:
            self._work()
        finally:
            self._backlog.close()  # long done, unless the work failed
            if self._open:
                _abandoned.append((self._agent, self._open, self._regions))
        if not self._open:
            for peer in list(self._peers):
                self._remove_peer(peer)
            for known in self._kept.values():
                self._disconnect(known)
            self._agent.close()

    def _work(self) -> None:
        while self._stop_at is None or (self._open and time.monotonic() < self._stop_at):
            self._wait()
            self._posted = self._post()
            self._poll()
            self._agent.progress()

    def _stop(self) -> None:
        self._stop_at = time.monotonic() + _CLOSE_S

    def _wait(self) -> None:
        """Obeys what is in the inbox; sleeps if there is nothing to do."""
        timeout = self._pause()
        while True:
            try:
                work = self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
            except queue.Empty:
                return
            timeout = 0.0
            if work:
                work()

    def _pause(self) -> float:
        if self._posted:
            return 0.0
        now = time.monotonic()
        if not self._open:
            return self._hurried_period_s if now < self._hurried_until else self._period_s
        return 0.0 if now - self._last_post < _SPIN_S else _NAP_S

    def _post(self) -> bool:
        """Whether there was a piece to post; only one a turn, since each may take its time."""
        found = self._backlog.take(self._may_post)
        if not found:
            return False
        read, piece = found
        try:
            transfer = self._start(piece)
        except TransferError as e:
            read.finish(e)
            return True
        self._faults.reach(POSTED)
        self._last_post = time.monotonic()
        if transfer is None:
            self._finish(read, piece)
        else:
            self._open.append(_Open(transfer, read, piece))
        return True

    def _may_post(self, piece: Piece) -> bool:
        """A peer whose READs never end keeps nobody but itself waiting, and when they are given up
        not even that."""
        if piece.lane not in (None, self):
            return False
        wanted = [entry for entry in self._open if not entry.read.stopped]
        return sum(entry.piece.peer is piece.peer for entry in wanted) < _MAX_OPEN

    def _start(self, piece: Piece) -> Transfer | None:
        shared, pairs = piece.peer, piece.pairs
        connection = self._peers[shared]
        blocks = connection.blocks.get(pairs.group)
        if blocks is None:
            blocks = self._agent.peer_blocks(connection.name, shared.regions[pairs.group])
            connection.blocks[pairs.group] = blocks
        try:
            if self._faults.reach(READ) == BREAK:
                raise ReadRefused("a fault was asked for")
            transfer = self._agent.post(pairs.group, pairs.local, blocks, pairs.remote)
        except TransferError as e:
            if shared.was_read:
                raise LinkLost(f"the peer is gone: {e}") from e
            if isinstance(e, ReadRefused):
                connection.refused = not connection.was_used
                raise OneSidedRefused(_NO_WAY) from e
            raise
        connection.was_used = True
        return transfer

    def _poll(self) -> None:
        still_open = []
        for entry in self._open:
            try:
                if not self._agent.poll(entry.transfer):
                    still_open.append(entry)
                    continue
            except TransferError as e:
                entry.read.finish(e)
            else:
                self._finish(entry.read, entry.piece)
        self._open = still_open

    def _finish(self, read: PieceRead[Piece], piece: Piece) -> None:
        piece.peer.was_read = True
        read.finish()

    def _add_peer(self, peer: SharedPeer) -> bool:
        """A connection that has failed is not mended by adding the peer once more, so it is removed
        before; but not while a READ over it may still write, of which nothing else can be known.
        Then the first READ tells whether it has failed, and leads to another connector if so.

        To nixl all links to one process are one peer: the others, of which a read may have pieces
        left, or which know it by another address, prepare its blocks anew for their next READ."""
        same = [other for other in self._peers if other.metadata == peer.metadata]
        connection = self._peers[same[0]] if same else self._kept.get(peer.metadata)
        was_there = connection is not None
        if connection is not None and connection.refused:
            raise OneSidedRefused(_NO_WAY)
        self._kept.pop(peer.metadata, None)
        if connection is None:
            connection = _Connection(self._agent.add_peer(peer.metadata))
        elif peer.anew and not any(map(self._reads_from, same)):
            self._disconnect(connection)
            self._agent.add_peer(peer.metadata)
            connection.was_used = was_there = False
        self._peers[peer] = connection
        return was_there

    def _remove_peer(self, peer: SharedPeer) -> None:
        """Its connection is kept for the next link: UCX closes one end alone, so that sockets stay
        open at both for as long as both processes live."""
        connection = self._peers.pop(peer, None)
        if connection is None or connection in self._peers.values():
            return
        self._release_blocks(connection)
        self._kept[peer.metadata] = connection
        if len(self._kept) > _MAX_KEPT:
            self._disconnect(self._kept.pop(next(iter(self._kept))))

    def _disconnect(self, connection: _Connection) -> None:
        self._release_blocks(connection)
        self._agent.remove_peer(connection.name)

    def _release_blocks(self, connection: _Connection) -> None:
        for blocks in connection.blocks.values():
            self._agent.release_blocks(blocks)
        connection.blocks.clear()

    def _reads_from(self, peer: SharedPeer) -> bool:
        return any(entry.piece.peer is peer for entry in self._open)
