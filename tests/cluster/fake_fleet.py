"""A relay over workers that say what they are told: real sessions and load reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import pytest

from cluster.pools import Pools
from cluster.published import metadata_of
from cluster.relay import Relay, RelayConfig
from cluster.relay_stream import RelayStream
from decode_worker.service import SessionService
from engine.request import (
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    RequestId,
)
from engine.sampling import SamplingParams
from protos.events_pb2 import LoadReport, SubscribeRequest, WorkerEvent
from protos.events_pb2_grpc import WorkerEventsServicer, add_WorkerEventsServicer_to_server
from protos.rpc import Plane
from protos.session_pb2_grpc import add_SessionServicer_to_server
from protos.worker_pb2 import WorkerDescription
from router.config import RouterConfig
from router.load_report import read_load
from router.router import Router
from router.workers import Leg, Worker
from tests.decode_worker.fakes import DESCRIPTION, PushedAnswerer, PushedStream
from tests.waiting import until

RELEASE = "r"
FINGERPRINT = DESCRIPTION.format.fingerprint
INCARNATION = 5
END = FinishReason.LENGTH


def make_pools(router: RouterConfig | None = None) -> Pools:
    return Pools(Plane(), RELEASE, Router(router or RouterConfig(), Random(0)))


class Loads(WorkerEventsServicer):
    def __init__(self) -> None:
        self.report = LoadReport()

    async def Subscribe(
        self, request: SubscribeRequest, context: object
    ) -> AsyncIterator[WorkerEvent]:
        while True:
            self.report.incarnation = INCARNATION
            yield WorkerEvent(load=self.report)
            await asyncio.sleep(0.02)


@dataclass
class FakeWorker:
    """A worker's services, and nothing behind them."""

    answerer: PushedAnswerer = field(default_factory=PushedAnswerer)
    loads: Loads = field(default_factory=Loads)
    description: WorkerDescription = field(default_factory=lambda: DESCRIPTION)

    async def start(self) -> None:
        self.sessions = SessionService(self.answerer, self.description)
        self.server = Plane().server()
        add_SessionServicer_to_server(self.sessions, self.server)
        add_WorkerEventsServicer_to_server(self.loads, self.server)
        self.address = Plane().listen(self.server, "127.0.0.1:0")
        await self.server.start()

    @property
    def worker(self) -> Worker:
        return Worker(self.address, INCARNATION, self.description.format.fingerprint)

    def deafen(self) -> None:
        """As if it were dead already, and its connection did not know."""
        for session in self.sessions._sessions:
            session.receive = lambda message: None  # type: ignore[method-assign]

    async def die(self) -> None:
        await self.server.stop(None)

    async def stream(self, number: int = 0) -> PushedStream:
        await until(lambda: len(self.answerer.streams) > number)
        return self.answerer.streams[number]


class Fleet:
    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.workers: dict[str, FakeWorker] = {}
        self._published: dict[Leg, dict[str, Any]] = {leg: {} for leg in Leg}
        self._numbers = count()

    async def add(self, leg: Leg = Leg.DECODE, worker: FakeWorker | None = None) -> FakeWorker:
        """Ready for use when it returns."""
        worker = worker or FakeWorker()
        await self.start(worker)
        self.name_again(worker, leg)
        if leg is Leg.DECODE:
            await self.relay.pools.first_description()
        await until(lambda: self._is_usable(leg, worker))
        return worker

    async def start(self, worker: FakeWorker) -> None:
        """The relay knows nothing of it."""
        await worker.start()
        self.workers[worker.address] = worker

    async def hear(self, worker: FakeWorker, leg: Leg = Leg.DECODE) -> None:
        """Until the router knows what its report says now."""

        def is_heard() -> bool:
            loads = {one.worker: one.standing.load for one in self.relay.router.accounts(leg)}
            known = loads[worker.worker]
            return known is not None and known == read_load(worker.loads.report, known.at)

        await until(is_heard)

    def remove(self, worker: FakeWorker, leg: Leg = Leg.DECODE) -> None:
        del self._published[leg][worker.address]
        self.relay.pools.update(leg, self._published[leg])

    def name_again(self, worker: FakeWorker, leg: Leg = Leg.DECODE) -> None:
        self._published[leg][worker.address] = metadata_of(worker.worker, RELEASE)
        self.relay.pools.update(leg, self._published[leg])

    def _is_usable(self, leg: Leg, worker: FakeWorker) -> bool:
        if leg is Leg.PREFILL:
            return worker.worker in self.relay.pools.usable(Leg.PREFILL)
        return worker.worker in self.relay.pools.usable(Leg.DECODE)

    async def close(self) -> None:
        await self.relay.pools.close()
        for worker in self.workers.values():
            await worker.die()


class MakeFleet:
    """Closes each, whatever becomes of the test. A server of gRPC's that outlives its loop raises
    wherever the garbage collector finds it: in pytest too, which then reports no failure at all."""

    def __init__(self) -> None:
        self.made: list[Fleet] = []

    def __call__(
        self, config: RelayConfig | None = None, router: RouterConfig | None = None
    ) -> Fleet:
        self.made.append(Fleet(Relay(make_pools(router), config)))
        return self.made[-1]


@pytest.fixture
async def make_fleet() -> AsyncIterator[MakeFleet]:
    make = MakeFleet()
    yield make
    for fleet in make.made:
        await fleet.close()


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    return make_fleet(RelayConfig(max_alone_s=5.0))


def request(name: str = "a", n: int = 1) -> GenerationRequest:
    params = SamplingParams(max_tokens=50, n=n)
    return GenerationRequest(RequestId(name), [1, 2, 3], params, timeout_s=30.0)


async def next_tokens(stream: RelayStream) -> list[int]:
    update = await next_update(stream)
    return [token for delta in update.deltas for token in delta.token_ids]


async def next_update(stream: RelayStream) -> GenerationUpdate:
    async with asyncio.timeout(30):
        return await anext(stream)
