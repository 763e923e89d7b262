"""Two engines behind one event loop: a prompt goes from one to the other, or does not."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.async_streams import HandOverStream
from engine.engine import Engine
from engine.errors import RequestError, StepError, UnavailableError
from engine.handoff import (
    ComputeHere,
    Delivered,
    FetchFailed,
    PromptChunk,
    PromptEnd,
    Refetch,
    Reservation,
    UnfinishedReads,
)
from engine.request import GenerationRequest, HandOver, RequestId
from engine.sampling import SamplingParams
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import copy_blobs, make_engine
from tests.engine.test_async_engine import idle, read

PROMPT = [i % 200 for i in range(150)]


def request(name: str, **more: Any) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=5)
    return GenerationRequest(RequestId(name), PROMPT, params, **more)


class Fetcher:
    """The decode side, and a queue of what it reserves."""

    def __init__(self, engine: Engine) -> None:
        self.reserved: asyncio.Queue[Reservation] = asyncio.Queue()
        self.serving = AsyncEngine(engine, on_reserved=self.reserved.put_nowait)

    async def next(self) -> Reservation:
        async with asyncio.timeout(30):
            return await self.reserved.get()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    folder = str(make_tiny("llama", tmp_path_factory.mktemp("llama")).folder)
    return (
        make_engine(folder, max_num_batched_tokens=24, max_num_seqs=1),
        make_engine(folder, max_num_seqs=1),
    )


@pytest.fixture
async def prefill(engines: tuple[Engine, Engine]) -> AsyncIterator[AsyncEngine]:
    engines[0].reset_prefix_cache()
    serving = AsyncEngine(engines[0])
    serving.start()
    yield serving
    await idle(serving)
    serving.stop()


@pytest.fixture
async def fetcher(engines: tuple[Engine, Engine]) -> AsyncIterator[Fetcher]:
    engines[1].reset_prefix_cache()
    fetcher = Fetcher(engines[1])
    fetcher.serving.start()
    yield fetcher
    await idle(fetcher.serving)
    fetcher.serving.stop()


async def carry(stream: HandOverStream, source: AsyncEngine, fetcher: Fetcher) -> Delivered:
    """Reads what is announced."""
    reservation = await fetcher.next()
    chunks: list[PromptChunk] = []
    async for news in stream:
        if isinstance(news, PromptEnd):
            tokens = news.first_tokens
        else:
            chunks.append(news)
            copy_blobs(source.engine, news.held, fetcher.serving.engine, reservation.held)
    stream.close()
    delivered = Delivered(tokens)
    assert await fetcher.serving.end_fetch(reservation, delivered) == ()
    for chunk in chunks:
        source.drop_holds(chunk.held.holds)
    return delivered


async def test_a_prompt_goes_over(prefill: AsyncEngine, fetcher: Fetcher) -> None:
    alone, _ = await read(fetcher.serving.submit(request("alone")))
    fetcher.serving.call(lambda engine: engine.reset_prefix_cache())
    answer = fetcher.serving.submit(request("r", fetch_above=0))
    stream = prefill.hand_over(request("r", hand_over=HandOver()))
    delivered = await carry(stream, prefill, fetcher)
    assert [token.token_id for token in delivered.first_tokens] == alone[:1]
    tokens, _ = await read(answer)
    assert tokens == alone


async def test_chunks_that_nobody_read_are_let_go(prefill: AsyncEngine) -> None:
    stream = prefill.hand_over(request("r", hand_over=HandOver()))
    first = await anext(stream)
    assert isinstance(first, PromptChunk)
    stream.close()
    stream.close()
    prefill.drop_holds(first.held.holds)
    await idle(prefill)
    stream = prefill.hand_over(request("r", hand_over=HandOver()))
    async with asyncio.timeout(30):
        while not isinstance(stream._unread[-1] if stream._unread else None, PromptEnd):
            await asyncio.sleep(0)
    stream.close()


async def test_a_refused_prompt_says_so(prefill: AsyncEngine) -> None:
    stream = prefill.hand_over(request("r", hand_over=HandOver(first_token=1)))
    with pytest.raises(RequestError, match="first_token"):
        await anext(stream)


async def test_a_thread_that_waits_for_transfers_sleeps(
    fetcher: Fetcher, prefill: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with others that wait behind it; and it is no stall."""
    serving, calls = fetcher.serving, 0
    whole = serving.engine.step

    def step() -> Any:
        nonlocal calls
        calls += 1
        return whole()

    monkeypatch.setattr(serving.engine, "step", step)
    fetching = serving.submit(request("fetching", fetch_above=0))
    reservation = await fetcher.next()
    waiting = serving.submit(request("waiting"))
    async with asyncio.timeout(30):
        while calls < 2 or serving._watchdog.stalled_s(math.inf) is not None:
            await asyncio.sleep(0)
        while not serving.at_rest:
            await asyncio.sleep(0)
    await read(prefill.submit(request("meanwhile")))
    assert calls <= 2
    serving.check_health()
    assert await serving.end_fetch(reservation, ComputeHere()) == ()
    answers = await asyncio.gather(read(fetching), read(waiting))
    assert [len(tokens) for tokens, _ in answers] == [5, 5]


async def test_whatever_becomes_of_a_request_its_reservation_is_ended(fetcher: Fetcher) -> None:
    serving = fetcher.serving
    stream = serving.submit(request("r", fetch_above=0))
    reservation = await fetcher.next()
    assert await serving.end_fetch(reservation, Refetch()) == ()
    reservation = await fetcher.next()
    stream.close()
    stuck = UnfinishedReads(0, reservation.held.runs[0].blocks[:2])
    failed = FetchFailed(StepError("gone"))
    (hold,) = await serving.end_fetch(reservation, failed, [stuck])
    await idle(serving)
    serving.end_quarantine(hold)
    stream = serving.submit(request("r", fetch_above=0))
    await serving.end_fetch(await fetcher.next(), failed)
    with pytest.raises(StepError, match="gone"):
        await anext(stream)


async def test_what_is_cached_can_be_held(prefill: AsyncEngine) -> None:
    await read(prefill.submit(request("warm")))
    held = await prefill.hold_cached(PROMPT, "", 16)
    assert (held.start, held.end) == (16, 144)
    prefill.drop_holds(held.holds)
    with pytest.raises(RequestError, match="prompt"):
        await prefill.hold_cached([], "", 0)
    lost = asyncio.ensure_future(prefill.hold_cached(PROMPT, "", 0))
    await asyncio.sleep(0)
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost


async def test_stopping_leaves_nobody_waiting(engines: tuple[Engine, Engine]) -> None:
    engines[1].reset_prefix_cache()  # a hold whose answer comes too late would have no end
    fetcher = Fetcher(engines[1])
    serving = fetcher.serving
    serving.start()
    answer = serving.submit(request("r", fetch_above=0))
    reservation = await fetcher.next()
    asked = asyncio.ensure_future(serving.hold_cached(PROMPT))
    await asyncio.sleep(0)
    serving.stop()
    for waiting in (asked, anext(answer), serving.end_fetch(reservation, ComputeHere())):
        with pytest.raises(UnavailableError, match="stopping"):
            async with asyncio.timeout(30):
                await waiting
    engines[1].abort(RequestId("r"))
    engines[1].end_fetch(reservation, ComputeHere())


async def test_a_dead_thread_leaves_nobody_waiting(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Fetcher(fetcher.serving.engine).serving
    serving.start()

    def die(*_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(serving.engine, "hold_cached", die)
    for waiting in (serving.hold_cached(PROMPT), serving.hold_cached(PROMPT)):
        with pytest.raises(UnavailableError, match="bug"):
            async with asyncio.timeout(30):
                await waiting
    serving.engine.tell_early = fetcher.serving._post
