"""A request has no more time than it gave itself, wherever it is then."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from engine.async_engine import AsyncEngine
from engine.async_streams import EngineStream
from engine.engine import Engine
from engine.errors import DeadlineError
from engine.handoff import ComputeHere, Reservation
from engine.request import GenerationRequest, HandOver, RequestId
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import make_engine
from tests.engine.test_async_engine import idle, read

SHORT_S = 0.05
LONG = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=150)
MOST_STEPS = 100  # so that nobody has all of it in time, however late the event loop looks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("llama")).folder)


@pytest.fixture
async def serving(folder: str) -> AsyncIterator[AsyncEngine]:
    """One sequence at a time, and none to its end; nobody fills what is reserved."""
    engine = make_engine(folder, max_num_seqs=1)
    step, may_end = engine.step, threading.Event()

    def held_step() -> StepOutput:
        assert engine.num_steps < MOST_STEPS or may_end.wait(60)
        return step()

    engine.step = held_step  # type: ignore[method-assign]
    reserved: list[Reservation] = []
    serving = AsyncEngine(engine, on_reserved=reserved.append)
    serving.start()
    yield serving
    may_end.set()
    for reservation in reserved:
        await serving.end_fetch(reservation, ComputeHere())
    await idle(serving)
    await serving.ask(Engine.check_integrity)
    await serving.end()


def request(name: str, timeout_s: float | None = SHORT_S) -> GenerationRequest:
    return GenerationRequest(RequestId(name), [1, 2, 3], LONG, timeout_s=timeout_s)


async def check_ends_in_time(stream: EngineStream) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(DeadlineError, match="the request's time"):
            await read(stream)
    stream.close()


async def test_running_and_queued(serving: AsyncEngine) -> None:
    running = serving.submit(request("running"))
    queued = serving.submit(request("queued"))
    for stream in (running, queued):
        await check_ends_in_time(stream)


async def test_while_its_prompt_is_fetched(serving: AsyncEngine) -> None:
    await check_ends_in_time(serving.submit(replace(request("fetched"), fetch_above=0)))


async def test_while_it_is_computed_for_others_who_do_not_read(serving: AsyncEngine) -> None:
    before = serving.submit(request("before", timeout_s=None))
    handed = serving.hand_over(replace(request("handed"), hand_over=HandOver()))
    async with asyncio.timeout(30):
        await handed.wait()
        with pytest.raises(DeadlineError):
            handed.take()
    handed.close()
    before.close()


async def test_behind_an_engine_that_is_stuck(serving: AsyncEngine) -> None:
    let_go = threading.Event()

    def hang(_: Engine) -> None:
        let_go.wait(10)

    serving.call(hang)
    try:
        await check_ends_in_time(serving.submit(request("stuck")))
    finally:
        let_go.set()


async def test_what_is_there_in_time_is_told_later(serving: AsyncEngine) -> None:
    params = replace(LONG, max_tokens=3)
    stream = serving.submit(replace(request("in time", timeout_s=60.0), params=params))
    tokens, _ = await read(stream)
    assert len(tokens) == 3
    late = serving.submit(replace(request("read late", timeout_s=60.0), params=params))
    async with asyncio.timeout(30):
        while not late._has_ended():
            await asyncio.sleep(0.01)
    late._expire()
    assert (await read(late))[0] == tokens
