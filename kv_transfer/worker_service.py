"""What every worker answers, whichever leg it runs: what it is, whether it works, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc.aio

from kv_transfer.compatible import check_caller
from kv_transfer.errors import IncompatiblePeer
from protos.failures import abort_with
from protos.generation_pb2 import Failure
from protos.worker_pb2 import (
    DescribeRequest,
    DrainProgress,
    DrainRequest,
    HealthReport,
    HealthRequest,
    WorkerDescription,
)
from protos.worker_pb2_grpc import WorkerServicer

_MOST_UNREAD = 16  # progresses; the oldest go


class ServingWorker(Protocol):
    """A worker as others may ask about it; used on its event loop's thread."""

    @property
    def description(self) -> WorkerDescription: ...

    def expect_peer(self) -> None:
        """Whoever has just been told of it may connect."""
        ...

    async def check_health(self, check_integrity: bool) -> HealthReport:
        """Answers within seconds: a stuck engine is what it is asked about."""
        ...

    def drain(self, deadline_s: float | None) -> AsyncIterator[DrainProgress]:
        """Takes nothing new from here on, whether or not anyone goes on reading; the last
        progress is done, or has a failure. What is left at the deadline ends with UNAVAILABLE.
        """
        ...


class WorkerService(WorkerServicer):
    def __init__(self, worker: ServingWorker) -> None:
        self._worker = worker
        self._drains: set[asyncio.Task[None]] = set()  # the event loop keeps none

    async def Describe(
        self,
        request: DescribeRequest,
        context: grpc.aio.ServicerContext[DescribeRequest, WorkerDescription],
    ) -> WorkerDescription:
        description = self._worker.description
        try:
            check_caller(description.format, request)
        except IncompatiblePeer as error:
            await abort_with(context, as_failure(error))
        self._worker.expect_peer()
        return description

    async def CheckHealth(
        self,
        request: HealthRequest,
        context: grpc.aio.ServicerContext[HealthRequest, HealthReport],
    ) -> HealthReport:
        return await self._worker.check_health(request.check_integrity)

    async def Drain(
        self,
        request: DrainRequest,
        context: grpc.aio.ServicerContext[DrainRequest, DrainProgress],
    ) -> AsyncIterator[DrainProgress]:
        """Goes on to its end, whatever becomes of the caller."""
        deadline_s = request.deadline_ms / 1000 if request.deadline_ms else None
        news: asyncio.Queue[DrainProgress | None] = asyncio.Queue(_MOST_UNREAD)
        drain = asyncio.create_task(_follow(self._worker.drain(deadline_s), news))
        self._drains.add(drain)
        drain.add_done_callback(self._drains.discard)
        while (progress := await news.get()) is not None:
            yield progress
        await drain


async def _follow(
    drain: AsyncIterator[DrainProgress], news: asyncio.Queue[DrainProgress | None]
) -> None:
    """None at the end."""

    def tell(progress: DrainProgress | None) -> None:
        if news.full():
            news.get_nowait()
        news.put_nowait(progress)

    try:
        async for progress in drain:
            tell(progress)
    finally:
        tell(None)


def as_failure(error: IncompatiblePeer) -> Failure:
    return Failure(
        kind=Failure.KIND_INCOMPATIBLE,
        field=error.field,
        message=str(error).removeprefix(f"{error.field}: "),
    )
