"""A worker service behind a real server: says what it is, and refuses when told to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from protos.failures import abort_with
from protos.generation_pb2 import Failure
from protos.rpc import Plane
from protos.worker_pb2 import (
    DescribeRequest,
    DrainProgress,
    DrainRequest,
    HealthReport,
    HealthRequest,
    WorkerDescription,
)
from protos.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server


class Echo(WorkerServicer):
    def __init__(self) -> None:
        self.num_calls = 0
        self.ended = asyncio.Event()  # a drain's caller is gone

    async def Describe(self, request: DescribeRequest, context: Any) -> WorkerDescription:
        self.num_calls += 1
        return WorkerDescription(protocol=request.protocol, model=request.version)

    async def CheckHealth(self, request: HealthRequest, context: Any) -> HealthReport:
        self.num_calls += 1
        failure = Failure(kind=Failure.KIND_INCOMPATIBLE, field="block_size", message="16 and 64")
        await abort_with(context, failure)

    async def Drain(self, request: DrainRequest, context: Any) -> AsyncIterator[DrainProgress]:
        self.num_calls += 1
        try:
            yield DrainProgress(num_sequences=1)
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@asynccontextmanager
async def echo_server(
    plane: Plane, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[Echo, str]]:
    server, echo = plane.server(), Echo()
    add_WorkerServicer_to_server(echo, server)
    bound = plane.listen(server, "127.0.0.1:0")
    await server.start()
    try:
        yield echo, bound
    finally:
        await server.stop(None)
