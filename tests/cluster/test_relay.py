"""Requests over both pools: real sessions and load reports, workers that say what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from cluster.pools import Pools, metadata_of
from cluster.relay import Relay, RelayConfig, RelayStream
from decode_worker.service import SessionService
from engine.errors import QueueFullError, RequestError, StepError, UnavailableError
from engine.request import (
    ChoiceDelta,
    ChoiceSoFar,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptReport,
    RequestId,
)
from engine.sampling import SamplingParams
from protos.events_pb2 import LoadReport, SubscribeRequest, WorkerEvent
from protos.events_pb2_grpc import WorkerEventsServicer, add_WorkerEventsServicer_to_server
from protos.rpc import Plane
from protos.session_pb2_grpc import add_SessionServicer_to_server
from router.workers import Leg, Worker
from tests.decode_worker.fakes import DESCRIPTION, PushedAnswerer, PushedStream

RELEASE = "r"
FINGERPRINT = DESCRIPTION.format.fingerprint
END = FinishReason.LENGTH


class Loads(WorkerEventsServicer):
    def __init__(self) -> None:
        self.report = LoadReport()

    async def Subscribe(
        self, request: SubscribeRequest, context: object
    ) -> AsyncIterator[WorkerEvent]:
        while True:
            yield WorkerEvent(load=self.report)
            await asyncio.sleep(0.02)


@dataclass
class FakeWorker:
    """A worker's services, and nothing behind them."""

    answerer: PushedAnswerer = field(default_factory=PushedAnswerer)
    loads: Loads = field(default_factory=Loads)

    async def start(self) -> None:
        self.sessions = SessionService(self.answerer, DESCRIPTION)
        self.server = Plane().server()
        add_SessionServicer_to_server(self.sessions, self.server)
        add_WorkerEventsServicer_to_server(self.loads, self.server)
        self.address = Plane().listen(self.server, "127.0.0.1:0")
        await self.server.start()

    @property
    def worker(self) -> Worker:
        return Worker(self.address, 5, FINGERPRINT)

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
        await worker.start()
        self.workers[worker.address] = worker
        self._published[leg][worker.address] = metadata_of(worker.worker, RELEASE)
        self.relay.pools.update(leg, self._published[leg])
        if leg is Leg.DECODE:
            await self.relay.pools.first_description()
        await until(lambda: self._is_usable(leg, worker))
        return worker

    def remove(self, worker: FakeWorker) -> None:
        del self._published[Leg.DECODE][worker.address]
        self.relay.pools.update(Leg.DECODE, self._published[Leg.DECODE])

    def _is_usable(self, leg: Leg, worker: FakeWorker) -> bool:
        if leg is Leg.PREFILL:
            known = [one.worker for one in self.relay.pools.prefill_candidates()]
            return worker.worker in known
        return worker.address in self.relay.pools.usable_decode_addresses()

    async def close(self) -> None:
        await self.relay.pools.close()
        for worker in self.workers.values():
            await worker.die()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    relay = Relay(Pools(Plane(), RELEASE), RelayConfig(max_wait_s=5.0))
    fleet = Fleet(relay)
    yield fleet
    await fleet.close()


def request(name: str = "a", n: int = 1) -> GenerationRequest:
    params = SamplingParams(max_tokens=50, n=n)
    return GenerationRequest(RequestId(name), [1, 2, 3], params, timeout_s=30.0)


async def next_tokens(stream: RelayStream) -> list[int]:
    update = await next_update(stream)
    return [token for delta in update.deltas for token in delta.token_ids]


async def next_update(stream: RelayStream) -> GenerationUpdate:
    async with asyncio.timeout(10):
        return await anext(stream)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_an_answer_goes_on_at_another_worker(fleet: Fleet) -> None:
    """With what its client has; the prompt is reported once."""
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    began = await first.stream()
    began.push(ChoiceDelta(0, [7, 8]), prompt=PromptReport(2))
    update = await next_update(stream)
    assert update.prompt is not None
    second = await fleet.add()
    await first.die()
    reading = asyncio.create_task(next_update(stream))
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == (ChoiceSoFar([7, 8]),)
    timeout_s = goes_on.submitted.request.timeout_s
    assert timeout_s is not None
    assert timeout_s < 30.0
    goes_on.push(ChoiceDelta(0, [9], finish_reason=END), prompt=PromptReport(3))
    update = await reading
    assert (list(update.deltas[0].token_ids), update.prompt) == ([9], None)
    with pytest.raises(StopAsyncIteration):
        await next_update(stream)
    stream.close()


async def test_choices_that_are_whole_stay_so(fleet: Fleet) -> None:
    first = await fleet.add()
    stream = fleet.relay.submit(request(n=3))
    began = await first.stream()
    began.push(ChoiceDelta(0, [7], finish_reason=END), ChoiceDelta(1, [8]), prompt=PromptReport(0))
    assert await next_tokens(stream) == [7, 8]
    stream.stop_choice(1)
    second = await fleet.add()
    await first.die()
    reading = asyncio.create_task(next_tokens(stream))
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == (
        ChoiceSoFar([7], finished=True),
        ChoiceSoFar([8], finished=True),
        ChoiceSoFar([]),
    )
    goes_on.push(ChoiceDelta(2, [9], finish_reason=END))
    assert await reading == [9]
    stream.close()


async def test_an_answer_waits_for_a_worker_to_come(fleet: Fleet) -> None:
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    await first.stream()
    await first.die()
    reading = asyncio.create_task(next_tokens(stream))
    fleet.remove(first)
    second = await fleet.add()
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == ()
    goes_on.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    stream.close()


async def test_a_request_that_workers_die_of_is_not_tried_on_a_third(fleet: Fleet) -> None:
    workers = [await fleet.add() for _ in range(3)]
    stream = fleet.relay.submit(request("poison"))
    reading = asyncio.create_task(next_update(stream))
    for number in range(2):
        await until(lambda: any(is_answering(worker) for worker in workers))
        (victim,) = [worker for worker in workers if is_answering(worker)]
        workers.remove(victim)
        victim.answerer.streams[-1].push(ChoiceDelta(0, [number]))
        await reading
        reading = asyncio.create_task(next_update(stream))
        await victim.die()
    with pytest.raises(StepError, match="2 workers died under request poison"):
        await reading
    assert not workers[0].answerer.streams
    stream.close()


async def test_workers_that_were_dead_before_are_not_its_doing(fleet: Fleet) -> None:
    """A machine with several workers goes at once."""
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await first.stream()
    answer.push(ChoiceDelta(0, [1]), prompt=PromptReport(0))
    assert await next_tokens(stream) == [1]
    second = await fleet.add()
    reading = asyncio.create_task(next_tokens(stream))
    await first.die()
    await second.stream()
    await second.die()
    third = await fleet.add()
    (await third.stream()).push(ChoiceDelta(0, [2], finish_reason=END))
    assert await reading == [2]
    stream.close()


def is_answering(worker: FakeWorker) -> bool:
    return any(not stream.closed.is_set() for stream in worker.answerer.streams)


async def test_a_worker_that_leaves_keeps_what_nobody_else_can_take(fleet: Fleet) -> None:
    only = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await only.stream()
    only.sessions.drain()
    only.sessions.ask_to_move()
    await until(lambda: not fleet.relay.pools.usable_decode_addresses())
    answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await next_tokens(stream) == [1]
    stream.close()


async def test_a_worker_that_leaves_hands_its_answers_over(fleet: Fleet) -> None:
    """What had come and was not read yet is read first, and not asked for again."""
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await first.stream()
    answer.push(ChoiceDelta(0, [1]))
    assert await next_tokens(stream) == [1]
    second = await fleet.add()
    first.sessions.drain()
    answer.push(ChoiceDelta(0, [2]))
    await until(lambda: first.address not in fleet.relay.pools.usable_decode_addresses())
    first.sessions.ask_to_move()
    await until(answer.closed.is_set)
    assert await next_tokens(stream) == [2]
    reading = asyncio.create_task(next_tokens(stream))
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == (ChoiceSoFar([1, 2]),)
    goes_on.push(ChoiceDelta(0, [3], finish_reason=END))
    assert await reading == [3]
    stream.close()


async def test_a_full_worker_s_refusal_goes_to_the_next(fleet: Fleet) -> None:
    first, second = await fleet.add(), await fleet.add()
    second.loads.report.num_waiting = 9  # so that the first is preferred
    await asyncio.sleep(0.1)
    stream = fleet.relay.submit(request())
    (await first.stream()).fail(QueueFullError("the queue is full"))
    reading = asyncio.create_task(next_tokens(stream))
    (await second.stream()).push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    stream.close()


async def test_when_all_are_full_the_client_is_told(fleet: Fleet) -> None:
    workers = [await fleet.add(), await fleet.add()]
    stream = fleet.relay.submit(request())
    reading = asyncio.create_task(next_update(stream))
    for _ in workers:
        await until(lambda: any(is_answering(worker) for worker in workers))
        (busy,) = [worker for worker in workers if is_answering(worker)]
        busy.answerer.streams[-1].fail(QueueFullError("the queue is full"))
        await until(busy.answerer.streams[-1].closed.is_set)
    with pytest.raises(QueueFullError):
        await reading
    stream.close()


async def test_what_is_wrong_with_a_request_is_wrong_everywhere(fleet: Fleet) -> None:
    first, second = await fleet.add(), await fleet.add()
    stream = fleet.relay.submit(request())
    await until(lambda: is_answering(first) or is_answering(second))
    asked = first if is_answering(first) else second
    asked.answerer.streams[0].fail(RequestError("prompt", "too long"))
    with pytest.raises(RequestError):
        await next_update(stream)
    assert len(first.answerer.streams) + len(second.answerer.streams) == 1
    stream.close()


async def test_nobody_there_is_said_after_a_while() -> None:
    relay = Relay(Pools(Plane(), RELEASE), RelayConfig(max_wait_s=0.05))
    stream = relay.submit(request())
    with pytest.raises(UnavailableError, match="no decode worker"):
        await next_update(stream)
    with pytest.raises(UnavailableError):
        relay.check_health()
    stream.close()
    await relay.pools.close()


async def test_a_replica_that_serve_stops_keeps_its_answers_and_gets_no_new_ones(
    fleet: Fleet,
) -> None:
    first = await fleet.add()
    old = fleet.relay.submit(request("old"))
    answer = await first.stream()
    second = await fleet.add()
    fleet.remove(first)
    new = [fleet.relay.submit(request(f"new{number}")) for number in range(3)]
    await second.stream(2)
    answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await next_tokens(old) == [1]
    old.close()
    await until(lambda: first.sessions.num_sessions == 0)  # nothing keeps its session open
    for stream in new:
        stream.close()


async def test_prompts_go_to_the_prefill_worker_with_the_shortest_queue(fleet: Fleet) -> None:
    decode = await fleet.add()
    busy, idle = FakeWorker(), FakeWorker()
    busy.loads.report.num_queued_tokens = 5000
    await fleet.add(Leg.PREFILL, busy)
    await fleet.add(Leg.PREFILL, idle)
    stream = fleet.relay.submit(request())
    route = (await decode.stream()).submitted.route
    assert [worker.address for worker in route.prefill_workers] == [idle.address, busy.address]
    stream.close()


async def test_workers_of_another_release_are_not_used(fleet: Fleet) -> None:
    worker = FakeWorker()
    await worker.start()
    pools = fleet.relay.pools
    pools.update(Leg.DECODE, {"x": metadata_of(worker.worker, "another")})
    assert not pools.usable_decode_addresses()
    await asyncio.sleep(0.05)
    assert worker.sessions.num_sessions == 0
    await worker.die()
