"""What is known of a peer, and the one way in which its pool is read."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc

from kv_transfer.connector import PeerPool, Read
from kv_transfer.errors import Unreachable
from kv_transfer.load_messages import LoadCheck
from kv_transfer.probe import LinkFigures
from protos.events_pb2 import LoadReport, SubscribeRequest, WorkerEvent
from protos.events_pb2_grpc import WorkerEventsStub
from protos.handoff_pb2 import HolderMessage, PullerMessage
from protos.handoff_pb2_grpc import HandOffStub
from protos.limits import PROTOCOL
from protos.worker_pb2 import WorkerDescription

HandOffCall = grpc.aio.StreamStreamCall[PullerMessage, HolderMessage]
LoadCall = grpc.aio.UnaryStreamCall[SubscribeRequest, WorkerEvent]

logger = logging.getLogger(__name__)

LOAD_PERIOD_MS = 500
TELLING_BYTES = 1 << 20  # reads from this size on say something about the rate
SMOOTHING = 0.2
READ_PATIENCE, READ_PATIENCE_S = 3.0, 30.0  # times what it should take, and so much more


def report_load(channel: grpc.aio.Channel) -> LoadCall:
    """A peer's load as it comes, by a stream that breaks when the peer does."""
    wanted = SubscribeRequest(protocol=PROTOCOL, load_period_ms=LOAD_PERIOD_MS)
    return WorkerEventsStub(channel).Subscribe(wanted)


class Link:
    """One incarnation of a peer, described, compatible, its pool connected and read from once.

    Owns its channel, which is closed when the link has ended and its last hand-off with it.
    """

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        description: WorkerDescription,
        connector: str,
        pool: PeerPool,
        figures: LinkFigures,
    ) -> None:
        self.address = address
        self.description = description
        self.connector = connector
        self.pool = pool
        self.figures = figures
        self.lost: str | None = None
        self.load: LoadReport | None = None  # the peer's latest
        self.heard_at = time.monotonic()  # of it, or of the peer at all
        self._channel = channel
        self._watch: asyncio.Task[None] | None = None
        self._improving: asyncio.Task[None] | None = None
        self._check = LoadCheck(address)
        self._stub = HandOffStub(channel)
        self._calls: set[HandOffCall] = set()
        self._bytes_out = 0  # of reads that have not ended
        self._most_out = 0  # since there was none
        self._num_reads = 0
        self._ways: list[LinkFigures] = []  # that reads under way may have begun by, before this
        self._turns_s, self._turns_at = 0.0, time.monotonic()  # of any one of them, so far
        self._closing: asyncio.Task[None] | None = None

    @property
    def incarnation(self) -> int:
        return self.description.incarnation

    def open_handoff(self) -> HandOffCall:
        """Unreachable if it was lost meanwhile: there may be another one soon."""
        if self.lost is not None:
            raise Unreachable(f"the link to {self.address} is lost: {self.lost}")
        call = self._stub.Open()
        self._calls.add(call)
        call.add_done_callback(self._forget)
        return call

    def _forget(self, call: HandOffCall) -> None:
        self._calls.discard(call)
        self._close_if_unused()

    def watch(self, reports: LoadCall) -> None:
        """The link ends with them."""
        self._watch = asyncio.ensure_future(self._follow(reports))

    async def _follow(self, reports: LoadCall) -> None:
        try:
            async for event in reports:
                if isinstance(event, WorkerEvent):  # or else None: gRPC could not read it
                    self._take(event.load)
            self.lose("its load reports ended")
        except grpc.aio.AioRpcError as error:
            self.lose(f"its load reports broke off: {error.details()}")

    def _take(self, load: LoadReport) -> None:
        """A report that cannot be is none, and a peer without any is shunned."""
        if self._check.believes(load):
            self.load, self.heard_at = load, time.monotonic()

    def improve(self, improving: Coroutine[Any, Any, None]) -> None:
        """Looks for a better way to read the pool, until the link ends."""
        self._improving = asyncio.ensure_future(improving)

    def read_by(self, connector: str, pool: PeerPool, figures: LinkFigures) -> None:
        """From now on; reads that are under way end where they began, as slowly as ever."""
        self.pool.disconnect()
        if self._num_reads:
            self._ways.append(self.figures)
        self.connector, self.pool, self.figures = connector, pool, figures

    def lose(self, reason: str) -> None:
        """The next one who asks for the peer makes the link anew."""
        if self.lost is None:
            logger.warning("the link to %s is lost: %s", self.address, reason)
            self.end(reason)

    def end(self, reason: str = "closed") -> None:
        if self.lost is None:
            self.lost = reason
            self.pool.disconnect()
            for task in (self._watch, self._improving):
                if task is not None:
                    task.cancel()
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        """To close a channel is to cancel its calls, which their readers would take for their
        own cancellation."""
        if self.lost is not None and not self._calls and self._closing is None:
            self._closing = asyncio.ensure_future(self._channel.close())

    async def closed(self) -> None:
        """After `end`, when no hand-off of the link is left, nor what was tried beside it."""
        if self._improving is not None:
            await asyncio.wait({self._improving})
        if self._closing is not None:
            await self._closing

    def begin_read(self, group: int, remote: Sequence[int], local: Sequence[int]) -> Read:
        """Among those that are under way, which have a share in the rate."""
        read = self.pool.read(group, remote, local)
        self._bytes_out += read.num_bytes
        self._most_out = max(self._most_out, self._bytes_out)
        began_s, figures = self._count_turns(), self.figures
        self._num_reads += 1
        read.ended.add_done_callback(lambda _: self._forget_read(read, began_s, figures))
        return read

    @property
    def patience_s(self) -> float:
        """That any read may take; a network that fails may never say so. They take turns, so those
        that came later hold it up as well, and the last ones end together."""
        slowest = min(figures.bytes_per_s for figures in (self.figures, *self._ways))
        expected_s = self._most_out / max(1.0, slowest)
        return READ_PATIENCE_S + READ_PATIENCE * expected_s

    def _forget_read(self, read: Read, began_s: float, figures: LinkFigures) -> None:
        turns_s = self._count_turns() - began_s
        self._num_reads -= 1
        if not self._num_reads:
            self._ways.clear()
        self._bytes_out -= read.num_bytes
        if not self._bytes_out:
            self._most_out = 0
        is_there = not read.ended.cancelled() and read.ended.exception() is None
        if is_there and read.num_bytes >= TELLING_BYTES and turns_s > 0:
            rate = read.num_bytes / turns_s
            figures.bytes_per_s += SMOOTHING * (rate - figures.bytes_per_s)

    def _count_turns(self) -> float:
        """Seconds that a read has had the link to itself if it was there all the time. A read's
        bytes by the time that it took would say how many others it met: after a burst of prefixes
        none would seem worth pulling any more, and nothing would show that the link is as fast as
        ever."""
        now = time.monotonic()
        self._turns_s += (now - self._turns_at) / max(1, self._num_reads)
        self._turns_at = now
        return self._turns_s
