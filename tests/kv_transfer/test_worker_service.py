import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from kv_transfer.errors import IncompatiblePeer
from kv_transfer.link_maker import LinkMaker
from kv_transfer.worker_service import WorkerService
from protos.failures import failure_of
from protos.generation_pb2 import Failure
from protos.limits import PROTOCOL
from protos.worker_pb2 import (
    CacheFormat,
    DescribeRequest,
    DrainProgress,
    DrainRequest,
    HealthReport,
    HealthRequest,
    WorkerDescription,
)
from protos.worker_pb2_grpc import WorkerStub, add_WorkerServicer_to_server
from tests.kv_transfer.serving import serving

FORMAT = CacheFormat(fingerprint="hub:abc", block_size=16)


class IdleWorker:
    def __init__(self) -> None:
        self.deadlines: list[float | None] = []
        self.num_expected = 0
        self.description = WorkerDescription(protocol=PROTOCOL, model="tiny", format=FORMAT)

    def expect_peer(self) -> None:
        self.num_expected += 1

    async def check_health(self, check_integrity: bool) -> HealthReport:
        return HealthReport(healthy=False, reason="stuck", num_steps=7)

    async def drain(self, deadline_s: float | None) -> AsyncIterator[DrainProgress]:
        self.deadlines.append(deadline_s)
        yield DrainProgress(num_sequences=2)
        yield DrainProgress(done=True)


@pytest.fixture
def worker() -> IdleWorker:
    return IdleWorker()


async def test_handshake(worker: IdleWorker) -> None:
    service = WorkerService(worker)
    async with serving(lambda s: add_WorkerServicer_to_server(service, s)) as channel:
        stub = WorkerStub(channel)
        for request in (
            DescribeRequest(protocol=PROTOCOL, format=FORMAT),
            DescribeRequest(protocol=PROTOCOL),
        ):
            assert await stub.Describe(request, timeout=10) == worker.description
        other = DescribeRequest(protocol=PROTOCOL, format=CacheFormat(fingerprint="hub:abd"))
        for field, refused in (("fingerprint", other), ("protocol", DescribeRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Describe(refused, timeout=10)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            failure = failure_of(caught.value)
            assert (failure.kind, failure.field) == (Failure.KIND_INCOMPATIBLE, field)
        assert worker.num_expected == 2, "who was refused does not connect"


async def test_whose_format_is_which_is_told_where_a_link_is_made(worker: IdleWorker) -> None:
    service = WorkerService(worker)
    asked = CacheFormat(fingerprint="hub:abc", block_size=8)
    async with serving(lambda s: add_WorkerServicer_to_server(service, s)) as channel:
        me = DescribeRequest(protocol=PROTOCOL, format=asked)
        said = "10.0.0.1:7001 says: block_size: ours is 16, the peer's is 8"
        with pytest.raises(IncompatiblePeer, match=said):
            await LinkMaker(me, (), lambda _: channel).make("10.0.0.1:7001")


async def test_health_and_drain(worker: IdleWorker) -> None:
    service = WorkerService(worker)
    async with serving(lambda s: add_WorkerServicer_to_server(service, s)) as channel:
        stub = WorkerStub(channel)
        report = await stub.CheckHealth(HealthRequest(), timeout=10)
        assert report == HealthReport(healthy=False, reason="stuck", num_steps=7)
        for deadline_ms in (0, 1500):
            call = stub.Drain(DrainRequest(deadline_ms=deadline_ms), timeout=10)
            progress = [p async for p in call]
            assert progress == [DrainProgress(num_sequences=2), DrainProgress(done=True)]
        assert worker.deadlines == [None, 1.5]


class BusyWorker(IdleWorker):
    """With a sequence until it is told that this has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended, self.drained = asyncio.Event(), asyncio.Event()

    async def drain(self, deadline_s: float | None) -> AsyncIterator[DrainProgress]:
        yield DrainProgress(num_sequences=1)
        await self.ended.wait()
        yield DrainProgress(done=True)
        self.drained.set()


async def test_a_drain_goes_on_without_its_caller() -> None:
    """What is left at its deadline must end, whoever is there to hear of it."""
    worker = BusyWorker()
    service = WorkerService(worker)
    async with serving(lambda s: add_WorkerServicer_to_server(service, s)) as channel:
        call = WorkerStub(channel).Drain(DrainRequest(), timeout=10)
        assert await call.read() == DrainProgress(num_sequences=1)
        assert call.cancel()
        # Asked after it on the same connection: the server has heard of the cancellation.
        await WorkerStub(channel).CheckHealth(HealthRequest(), timeout=10)
        worker.ended.set()
        async with asyncio.timeout(10):
            await worker.drained.wait()
