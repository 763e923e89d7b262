"""A worker's load reports and cache events, as long as it answers."""

import asyncio
import logging
import time
from collections.abc import Callable

import grpc
import grpc.aio

from kv_transfer.errors import TransferError
from kv_transfer.event_messages import decode_batch, decode_part
from kv_transfer.load_messages import LoadCheck, check_load
from protos.events_pb2 import LoadReport, SubscribeRequest, WorkerEvent
from protos.events_pb2_grpc import WorkerEventsStub
from protos.failures import failure_of
from protos.generation_pb2 import Failure
from protos.limits import PROTOCOL
from router.held import BadEvents
from router.load_report import read_load
from router.patience import Patience
from router.worker_index import Outcome, WorkerIndex
from router.workers import Load

logger = logging.getLogger(__name__)

PERIOD_MS = 250
RETRY_S = 0.5


class WorkerFeed:
    """Calls `note` with every report of one worker, and keeps its index if there is one, until it
    is closed. Used on one event loop.

    One stream carries both. A new one is opened whenever it breaks, from where the index stands;
    and at once when the index cannot go on with what it got. If that does not help, the reports go
    on alone for a while: without them the worker would get no requests.
    """

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        note: Callable[[Load], None],
        index: WorkerIndex | None = None,
        incarnation: int = 0,
    ) -> None:
        """`incarnation`: 0 is whichever is there; another one's reports say nothing of it."""
        self._address = address
        self._incarnation = incarnation
        self._channel = channel
        self._note = note
        self._index = index
        self._patience = Patience()
        self._check = LoadCheck(address)
        self._task = asyncio.create_task(self._follow())

    def follow(self, index: WorkerIndex) -> None:
        """From the next report on."""
        self._index = index

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _follow(self) -> None:
        while True:
            try:
                await self._listen()
            except grpc.aio.AioRpcError as error:
                logger.debug("the events of %s broke off: %s", self._address, error.details())
                await asyncio.sleep(RETRY_S)
            except Exception:  # of ours: without its reports the worker would get no requests
                logger.exception("what %s told could not be taken", self._address)
                await asyncio.sleep(RETRY_S)

    async def _listen(self) -> None:
        """Returns when another stream is to be opened."""
        index = self._followed()
        call = WorkerEventsStub(self._channel).Subscribe(_request(index))
        try:
            async for event in call:
                if event.WhichOneof("kind") == "load":
                    self._take_load(event.load)
                    if self._followed() is not index:
                        return
                elif index is not None and self._apply(event, index).needs_snapshot:
                    self._patience.note_trouble(time.monotonic())
                    return
            await asyncio.sleep(RETRY_S)  # the worker ended it
        finally:
            call.cancel()

    def _followed(self) -> WorkerIndex | None:
        return self._index if self._patience.is_over(time.monotonic()) else None

    def _take_load(self, report: LoadReport) -> None:
        """One that cannot be is none, and a worker without any gets nothing."""
        if not self._check.believes(report):
            return
        if self._incarnation not in (0, report.incarnation):
            return
        index = self._index
        if index is not None and index.group < len(report.blocks):
            index.capacity = report.blocks[index.group].total
        self._note(read_load(report, time.monotonic()))

    def _apply(self, event: WorkerEvent, index: WorkerIndex) -> Outcome:
        try:
            outcome = _decode(event, index)
        except TransferError as error:
            index.distrust()
            outcome = self._refuse(error)
        except BadEvents as error:
            outcome = self._refuse(error)
        if outcome.needs_snapshot:
            logger.info("%s is followed anew: %s", self._address, outcome)
        return outcome

    def _refuse(self, error: Exception) -> Outcome:
        logger.warning("the events of %s cannot be: %s", self._address, error)
        return Outcome.BAD_EVENTS


def _request(index: WorkerIndex | None) -> SubscribeRequest:
    request = SubscribeRequest(protocol=PROTOCOL, load_period_ms=PERIOD_MS)
    if index is not None:
        request.cache_events = True
        request.incarnation, request.after_number = index.resume()
    return request


def _decode(event: WorkerEvent, index: WorkerIndex) -> Outcome:
    match event.WhichOneof("kind"):
        case "batch":
            return index.apply(decode_batch(event.batch))
        case "snapshot":
            return index.apply_part(decode_part(event.snapshot), event.snapshot.complete)
        case _:
            raise TransferError("an event of an unknown kind", retryable=False)


async def one_report(channel: grpc.aio.Channel, timeout_s: float) -> LoadReport | Failure:
    """The worker's next one, or why there is none in time, or none that can be."""
    wanted = SubscribeRequest(protocol=PROTOCOL, load_period_ms=PERIOD_MS)
    try:
        async for event in WorkerEventsStub(channel).Subscribe(wanted, timeout=timeout_s):
            if not isinstance(event, WorkerEvent):  # gRPC has None for what it cannot read
                raise TransferError("it cannot be read", retryable=False)
            if event.WhichOneof("kind") == "load":
                report: LoadReport = event.load
                check_load(report)
                return report
    except grpc.aio.AioRpcError as error:
        logger.debug("no load report: %s", error.details())
        return failure_of(error)
    except TransferError as error:
        message = f"what came is no load report: {error}"
        return Failure(kind=Failure.KIND_INCOMPATIBLE, message=message)
    return Failure(kind=Failure.KIND_UNAVAILABLE, message="it has ended")
