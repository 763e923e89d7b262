"""The stream that tells a router what a worker's cache holds and how busy it is."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import grpc.aio

from kv_cache.events import EventBatch, Gap, Snapshot
from kv_transfer.compatible import check_protocol
from kv_transfer.errors import IncompatiblePeer
from kv_transfer.event_messages import encode_batch, encode_snapshot, fits
from kv_transfer.worker_service import as_failure
from protos.events_pb2 import LoadReport, SubscribeRequest, WorkerEvent
from protos.events_pb2_grpc import WorkerEventsServicer
from protos.failures import abort_with
from protos.generation_pb2 import Failure

PACE_S = 0.02  # from one look at the cache's events to the next, however fast they come
COMES_BACK_S = 1.0  # within which a router whose stream has broken opens another
# Three waits in a row and the time between two reports are less than what others take for silence,
# however long a step lasts.
ANSWER_S = 0.4

Answer = TypeVar("Answer")


class EventSource(Protocol):
    """A worker's cache and load. Events and snapshots take as long as the engine's step does, or a
    large cache, and are not asked for twice: the engine would carry out both."""

    @property
    def incarnation(self) -> int: ...

    async def events_since(self, number: int) -> Sequence[EventBatch] | Gap:
        """Empty, too, of an engine that is gone."""
        ...

    async def snapshot(self) -> Snapshot | None:
        """None of an engine that is gone."""
        ...

    async def newer(self, number: int) -> None:
        """Returns when this is not the latest batch."""
        ...

    async def load(self) -> LoadReport:
        """Within ANSWER_S, whatever the engine does, so that the reports of a stuck one go on and
        show that it makes no steps."""
        ...


class Subscription:
    """One subscriber's place in the event log; nothing is queued for it.

    Whoever reads slowly, or comes back after a while, gets a snapshot instead of the batches
    that the log gave up meanwhile.
    """

    def __init__(self, source: EventSource, request: SubscribeRequest) -> None:
        self._source = source
        knows_us = request.incarnation == source.incarnation
        self._applied = request.after_number if knows_us else None
        # What follows `_applied`, while the engine does not answer: it is waited for again.
        self._asked: asyncio.Task[Any] | None = None

    async def change(self) -> None:
        """Returns when there may be news; at once if they could not all be told."""
        if self._applied is not None:
            await self._source.newer(self._applied)

    async def news(self) -> AsyncIterator[WorkerEvent]:
        """All that is new now; each event counts as told when the next one is asked for."""
        if self._applied is not None:
            applied = self._applied
            batches = await self._answer(lambda: self._source.events_since(applied))
            if isinstance(batches, Gap) or not all(fits(batch) for batch in batches or ()):
                self._applied = None
            elif batches:
                for event in self._tell(batches):
                    yield event
        if self._applied is None:
            snapshot = await self._answer(self._source.snapshot)
            if snapshot is not None:
                for part in encode_snapshot(snapshot):
                    yield WorkerEvent(snapshot=part)
                self._applied = snapshot.number

    async def _answer(self, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer | None:
        """None if it takes longer; the next call waits for the same answer."""
        if self._asked is None:
            self._asked = asyncio.ensure_future(ask())
        asked: asyncio.Task[Answer] = self._asked
        await asyncio.wait({asked}, timeout=ANSWER_S)
        if not asked.done():
            return None
        self._asked = None
        return asked.result()

    def _tell(self, batches: Sequence[EventBatch]) -> Iterator[WorkerEvent]:
        for batch in batches:
            yield WorkerEvent(batch=encode_batch(batch))
            self._applied = batch.number


class EventService(WorkerEventsServicer):
    def __init__(self, source: EventSource, pace_s: float = PACE_S) -> None:
        self._source = source
        self._pace_s = pace_s
        self.num_routers = 0
        self._left_at = -math.inf

    def is_left(self) -> bool:
        """No router follows the cache here, nor may come back; links ask for the load alone."""
        gone_s = asyncio.get_running_loop().time() - self._left_at
        return not self.num_routers and gone_s >= COMES_BACK_S

    async def Subscribe(
        self,
        request: SubscribeRequest,
        context: grpc.aio.ServicerContext[SubscribeRequest, WorkerEvent],
    ) -> AsyncIterator[WorkerEvent]:
        failure = self._refusal(request)
        if failure is not None:
            await abort_with(context, failure)
        with self._followed() if request.cache_events else contextlib.nullcontext():
            async for event in self._told(request):
                yield event

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        self.num_routers += 1
        try:
            yield
        finally:
            self.num_routers -= 1
            self._left_at = asyncio.get_running_loop().time()

    async def _told(self, request: SubscribeRequest) -> AsyncIterator[WorkerEvent]:
        loop = asyncio.get_running_loop()
        subscription = Subscription(self._source, request)
        period_s = request.load_period_ms / 1000 or math.inf
        due = loop.time() if request.load_period_ms else math.inf
        while True:
            if loop.time() >= due:
                yield WorkerEvent(load=await self._source.load())
                due = max(due + period_s, loop.time())
            if request.cache_events:
                async for event in subscription.news():
                    yield event
                await asyncio.sleep(max(0.0, min(due - loop.time(), self._pace_s)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await subscription.change()
            else:
                await asyncio.sleep(max(0.0, due - loop.time()))

    def _refusal(self, request: SubscribeRequest) -> Failure | None:
        try:
            check_protocol(request.protocol)
        except IncompatiblePeer as error:
            return as_failure(error)
        shortest_ms = int(PACE_S * 1000)
        if 0 < request.load_period_ms < shortest_ms:
            message = f"{request.load_period_ms}, must be 0 or at least {shortest_ms}"
            return _invalid("load_period_ms", message)
        if not request.load_period_ms and not request.cache_events:
            return _invalid("cache_events", "neither these nor load reports are asked for")
        return None


def _invalid(field: str, message: str) -> Failure:
    return Failure(kind=Failure.KIND_INVALID, field=field, message=message)
