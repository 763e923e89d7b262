"""A worker's load reports, as long as it answers."""

import asyncio
import logging
import time
from collections.abc import Callable

import grpc
import grpc.aio

from protos.events_pb2 import LoadReport, SubscribeRequest
from protos.events_pb2_grpc import WorkerEventsStub
from protos.limits import PROTOCOL
from router.workers import Load

logger = logging.getLogger(__name__)

PERIOD_MS = 250
RETRY_S = 0.5


class LoadFeed:
    """Calls `note` with every report of one worker, until it is closed; subscribes again
    whenever the stream breaks. Used on one event loop."""

    def __init__(self, channel: grpc.aio.Channel, note: Callable[[Load], None]) -> None:
        self._channel = channel
        self._note = note
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _follow(self) -> None:
        wanted = SubscribeRequest(protocol=PROTOCOL, load_period_ms=PERIOD_MS)
        while True:
            try:
                async for event in WorkerEventsStub(self._channel).Subscribe(wanted):
                    if event.WhichOneof("kind") == "load":
                        self._note(_read(event.load))
            except grpc.aio.AioRpcError as error:
                logger.debug("load reports broke off: %s", error.details())
            await asyncio.sleep(RETRY_S)


async def one_report(channel: grpc.aio.Channel, timeout_s: float) -> LoadReport | None:
    """The worker's next one; None if it does not answer in time."""
    wanted = SubscribeRequest(protocol=PROTOCOL, load_period_ms=PERIOD_MS)
    try:
        async for event in WorkerEventsStub(channel).Subscribe(wanted, timeout=timeout_s):
            if event.WhichOneof("kind") == "load":
                report: LoadReport = event.load
                return report
    except grpc.aio.AioRpcError as error:
        logger.debug("no load report: %s", error.details())
    return None


def _read(report: LoadReport) -> Load:
    return Load(
        at=time.monotonic(),
        num_sequences=report.num_running + report.num_waiting + report.num_fetching,
        num_queued_tokens=report.num_queued_tokens,
        draining=report.draining,
        unhealthy=report.unhealthy,
    )
