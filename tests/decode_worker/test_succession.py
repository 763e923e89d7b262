"""A worker that is stopped while an ingress has no other to ask."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.session import SessionBackend
from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route
from engine.errors import UnavailableError
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from prefill_worker.node import Node
from protos.generation_pb2 import Failure
from protos.rpc import Plane
from router.subscriber import WorkerFeed
from router.worker_index import WorkerIndex
from router.workers import CacheShape
from tests.decode_worker.worker_group import WorkerGroup
from tests.engine.held import held
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import make_engine
from tests.waiting import until

_serial = count()


@pytest_asyncio.fixture
async def group(tmp_path: Path) -> AsyncIterator[WorkerGroup]:
    folder = str(make_tiny("llama", tmp_path, max_position_embeddings=2048).folder)
    decode, prefill = (make_engine(folder, max_model_len=2048) for _ in range(2))
    group = await WorkerGroup.start([decode], [prefill], "inprocess")
    yield group
    await group.check_idle()
    await group.stop()


@asynccontextmanager
async def ingress(group: WorkerGroup) -> AsyncIterator[SessionBackend]:
    backend = SessionBackend(group.addresses[group.decode[0]], Plane())
    await backend.start()
    yield backend
    await backend.stop()


@asynccontextmanager
async def router(group: WorkerGroup) -> AsyncIterator[WorkerFeed]:
    """Of an ingress, that follows the prefill worker."""
    (worker,) = group.prefill
    block_size = worker.engine.engine.info.shape.block_size
    index, told = WorkerIndex(CacheShape(block_size, 1, 0)), asyncio.Event()
    async with Plane().channel(group.addresses[worker]) as channel:
        feed = WorkerFeed("worker", channel, lambda load: told.set(), index)
        await told.wait()
        yield feed
        await feed.close()


async def drain(worker: Node, **limits: float) -> None:
    async with asyncio.timeout(30):
        async for _ in worker.drain(None, **limits):
            pass
    assert worker.draining


@asynccontextmanager
async def drained(worker: Node, **limits: float) -> AsyncIterator[None]:
    """Within it the worker is being stopped; after it, it has been."""
    stopping = asyncio.create_task(drain(worker, **limits))
    await asyncio.sleep(0)
    yield
    await stopping


def request(num_tokens: int) -> GenerationRequest:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return GenerationRequest(RequestId(f"s{next(_serial)}"), [1, 2, 3], params)


async def ask(backend: SessionBackend, num_tokens: int = 3, route: Route | None = None) -> int:
    stream = backend.submit(request(num_tokens), route)
    return sum([len(d.token_ids) async for update in stream for d in update.deltas])


async def test_it_takes_requests_until_the_last_ingress_has_left(group: WorkerGroup) -> None:
    async with (
        ingress(group) as first,
        ingress(group) as second,
        drained(group.decode[0], succession_s=600.0),
    ):
        assert await ask(first) == 3
        assert await ask(second) == 3
        await second.stop()
        assert await ask(first) == 3
        assert not first.leaving
        assert not group.decode[0].draining
        await first.stop()


async def test_an_ingress_whose_session_broke_may_come_back(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows no other worker still, and opens another session in a moment."""
    monkeypatch.setattr("cluster.session.FIRST_RETRY_S", 0.3)
    (worker,) = group.decode
    async with ingress(group) as backend, drained(worker, succession_s=600.0):
        for session in worker.sessions._sessions:
            session.fail(Failure(kind=Failure.KIND_BUSY, message="the session was not read"))
        await until(lambda: not backend.is_open)
        await until(lambda: backend.is_open)
        assert await ask(backend) == 3
        await backend.stop()


async def test_it_does_not_wait_forever(group: WorkerGroup) -> None:
    (worker,) = group.decode
    async with ingress(group) as backend:
        with held(worker.engine):
            stream = backend.submit(request(3))
            await until(lambda: worker.sessions.num_requests == 1)
            stopping = asyncio.create_task(drain(worker, succession_s=0.1))
            await until(lambda: worker.draining)
            with pytest.raises(UnavailableError, match="draining"):
                await ask(backend)
        assert sum([len(d.token_ids) async for update in stream for d in update.deltas]) == 3
        await stopping


async def test_one_that_asks_to_move_still_takes_what_nobody_else_can(group: WorkerGroup) -> None:
    async with (
        ingress(group) as backend,
        drained(group.decode[0], succession_s=600.0, move_after_s=0.1),
    ):
        await until(lambda: backend.wants_move)
        assert not backend.leaving
        assert await ask(backend) == 3
        await backend.stop()


def handed_over(group: WorkerGroup) -> Route:
    candidate = PrefillCandidate(group.addresses[group.prefill[0]])
    return Route((candidate,), (), LocalPrefill.NEVER)


async def test_a_prefill_worker_reads_until_the_last_router_has_left(group: WorkerGroup) -> None:
    """The link of a decode worker, which stays, is no router."""
    (worker,) = group.prefill
    async with (
        ingress(group) as backend,
        router(group) as first,
        router(group) as second,
        drained(worker, succession_s=600.0),
    ):
        assert await ask(backend, route=handed_over(group)) == 3
        await second.close()
        await until(lambda: worker.events.num_routers == 1)
        assert await ask(backend, route=handed_over(group)) == 3
        assert not worker.draining
        await first.close()


async def test_a_prefill_worker_does_not_wait_forever(group: WorkerGroup) -> None:
    async with router(group), drained(group.prefill[0], succession_s=0.2):
        pass
