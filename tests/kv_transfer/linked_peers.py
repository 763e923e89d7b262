"""Peers that say what they are and report a load, and connectors that do as they are told."""

import asyncio
from collections.abc import AsyncIterator, Callable

from kv_transfer.connector import PeerPool
from kv_transfer.errors import TransferError
from kv_transfer.links import Links
from protos.events_pb2 import LoadReport, SubscribeRequest, WorkerEvent
from protos.events_pb2_grpc import WorkerEventsServicer, add_WorkerEventsServicer_to_server
from protos.handoff_pb2 import HolderMessage
from protos.handoff_pb2_grpc import HandOffServicer, add_HandOffServicer_to_server
from protos.rpc import PROTOCOL, Plane
from protos.worker_pb2 import (
    CacheFormat,
    CacheGroup,
    ConnectorOffer,
    DescribeRequest,
    WorkerDescription,
)
from protos.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tests.kv_transfer.fakes import FakePeerPool, FakeRead, Memory

FORMAT = CacheFormat(fingerprint="f", block_size=8, groups=[CacheGroup(blob_bytes=4096)])


class Describer(WorkerServicer):
    """A worker that only says what it is."""

    def __init__(self) -> None:
        self.calls = 0
        self.description = WorkerDescription(
            protocol=PROTOCOL,
            incarnation=1,
            format=FORMAT,
            connectors=[ConnectorOffer(name=n) for n in ("fast", "plain")],
        )

    async def Describe(  # noqa: N802
        self, request: DescribeRequest, context: object
    ) -> WorkerDescription:
        self.calls += 1
        return self.description

    async def CheckHealth(self, request: object, context: object) -> None:  # type: ignore[override]  # noqa: N802
        raise NotImplementedError

    async def Drain(self, request: object, context: object) -> None:  # type: ignore[override]  # noqa: N802
        raise NotImplementedError


class Reporter(WorkerEventsServicer):
    """Reports a load as often as it is told to."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[LoadReport] = asyncio.Queue()

    async def Subscribe(  # noqa: N802
        self, request: SubscribeRequest, context: object
    ) -> AsyncIterator[WorkerEvent]:
        while True:
            yield WorkerEvent(load=await self.reports.get())


class Holder(HandOffServicer):
    """Opens hand-offs, and says nothing."""

    async def Open(self, messages: object, context: object) -> AsyncIterator[HolderMessage]:  # noqa: N802
        await asyncio.Event().wait()
        yield HolderMessage()


class FakeConnector:
    """Its peers' reads end as the test says."""

    def __init__(self, name: str, outcome: Exception | None = None, by_hand: bool = False) -> None:
        self.name = name
        self.by_hand = by_hand
        self.outcome = outcome
        self.refusal: TransferError | None = None
        self.pools: list[_Pool] = []

    def metadata(self) -> bytes:
        return b""

    async def connect(self, incarnation: int, metadata: bytes) -> PeerPool:
        if self.refusal:
            raise self.refusal
        pool = _Pool(self.outcome, self.by_hand)
        self.pools.append(pool)
        return pool

    def expect_peer(self) -> None:
        pass

    def problem(self) -> None:
        pass

    async def close(self) -> None:
        pass


class _Pool(FakePeerPool):
    def __init__(self, outcome: Exception | None, by_hand: bool) -> None:
        super().__init__(Memory(2), Memory(2), by_hand=True)
        self._outcome = outcome
        self.leave = by_hand

    def read(self, *pairs: object) -> FakeRead:
        read = super().read(*pairs)  # type: ignore[arg-type]
        if self.leave:
            return read
        if self._outcome is None:
            read.finish()
        else:
            read.ended.set_exception(self._outcome)
        return read


class Peer:
    """A describer behind a port that can go away and come back."""

    def __init__(self) -> None:
        self.describer = Describer()
        self.reporter = Reporter()
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        self._server = Plane().server()
        add_WorkerServicer_to_server(self.describer, self._server)
        add_WorkerEventsServicer_to_server(self.reporter, self._server)
        add_HandOffServicer_to_server(Holder(), self._server)
        self.address = Plane().listen(self._server, self.address)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)


MakeLinks = Callable[..., Links]


async def begun(connector: FakeConnector) -> None:
    async with asyncio.timeout(30):
        while not (connector.pools and connector.pools[0].reads):
            await asyncio.sleep(0)
