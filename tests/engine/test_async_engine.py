"""The engine behind an event loop: streams, aborts, refusals, a thread that dies."""

import asyncio
import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from engine.async_engine import AsyncEngine
from engine.async_streams import EngineStream
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import (
    EngineDiedError,
    EngineError,
    QueueFullError,
    RequestError,
    StepError,
    UnavailableError,
)
from engine.request import ChoiceSoFar, FinishReason, GenerationRequest, RequestId
from engine.sampler.edits import is_edited
from engine.sampler.interface import Draws
from engine.sampler.reference import ReferenceSampler
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from engine.step_times import StepShape, StepTimes
from tests.engine.held import held
from tests.engine.models_on_disk import make_tiny

Answer = TypeVar("Answer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048).folder


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
async def serving(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        kv_cache_memory_bytes=4 << 20,
        max_num_seqs=4,
        num_threads=1,
        max_num_queued_reqs=8,
        async_scheduling=request.param,
    )
    serving = AsyncEngine(Engine.create(config))
    serving.start()
    yield serving
    serving.stop()


def request(name: str, max_tokens: int = 5, **params: Any) -> GenerationRequest:
    sampling = SamplingParams(
        temperature=0.0, ignore_eos=True, **{"max_tokens": max_tokens, **params}
    )
    return GenerationRequest(RequestId(name), [1, 2, 3], sampling)


async def read(stream: EngineStream) -> tuple[list[int], list[FinishReason]]:
    tokens: list[int] = []
    reasons: list[FinishReason] = []
    async for update in stream:
        for delta in update.deltas:
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                reasons.append(delta.finish_reason)
    stream.close()
    return tokens, reasons


async def ask(serving: AsyncEngine, question: Callable[[Engine], Answer]) -> Answer:
    """What the engine's thread answers between two steps."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    def put(engine: Engine) -> None:
        loop.call_soon_threadsafe(answer.set_result, question(engine))

    serving.call(put)
    async with asyncio.timeout(30):
        return await answer


async def idle(serving: AsyncEngine) -> None:
    """Until the engine has nothing left to do; then nothing may be left."""
    async with asyncio.timeout(30):
        while await ask(serving, lambda engine: engine.has_work):
            pass
    await ask(serving, Engine.check_integrity)
    stats = await ask(serving, Engine.cache_stats)
    assert all(group.held == 0 for group in stats.groups)


def watchdog_sees_work(serving: AsyncEngine) -> bool:
    """The engine's thread notes that it has none a moment after its last command."""
    return serving._watchdog.stalled_s(math.inf) is not None


def test_it_warms_up_with_draws_of_both_kinds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each is compiled when it is first wanted."""
    edited: set[bool] = set()
    sample = ReferenceSampler.sample

    def noted(self: ReferenceSampler, logits: Any, draws: Draws, *rest: Any) -> Any:
        edited.add(is_edited(self._table.rows[draws.slots], None))
        return sample(self, logits, draws, *rest)

    monkeypatch.setattr(ReferenceSampler, "sample", noted)
    config = EngineConfig(
        model=str(folder), kernels="reference", kv_cache_memory_bytes=4 << 20, num_threads=1
    )
    Engine.create(config).close()
    assert edited == {False, True}


async def test_what_it_did_to_warm_up_counts_nowhere(serving: AsyncEngine) -> None:
    engine = serving.engine
    stats, figures = engine.cache_stats(), engine.figures()
    assert [group.evicted for group in stats.groups] == [0] * len(stats.groups)
    assert not any(figures)
    assert (engine.num_steps, engine.num_steps_ahead, engine.steps_s) == (0, 0, 0.0)
    assert engine.spent_s(time.perf_counter()) == 0.0


async def test_requests_at_once_get_the_answers_of_requests_alone(serving: AsyncEngine) -> None:
    alone, reasons = await read(serving.submit(request("alone", 12)))
    assert reasons == [FinishReason.LENGTH]
    assert len(alone) == 12
    together = await asyncio.gather(*(read(serving.submit(request(str(i), 12))) for i in range(8)))
    assert [tokens for tokens, _ in together] == [alone] * 8
    await idle(serving)


async def test_a_slow_reader_gets_everything_in_one_update(serving: AsyncEngine) -> None:
    stream = serving.submit(request("slow", 10))
    await idle(serving)
    await asyncio.sleep(0)
    update = await anext(stream)
    assert sum(len(delta.token_ids) for delta in update.deltas) == 10
    assert update.prompt is not None
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_a_stream_frees_its_blocks(serving: AsyncEngine) -> None:
    stream = serving.submit(request("long", 1500))
    await anext(stream)
    stream.close()
    stream.close()
    await idle(serving)
    async with asyncio.timeout(30):
        async for _ in stream:
            pass


async def test_a_stopped_choice_does_not_keep_the_stream_open(
    serving: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, go_on = serving.engine.step, threading.Event()

    def held_step() -> StepOutput:
        assert serving.engine.num_steps < 100 or go_on.wait(60)
        return step()

    monkeypatch.setattr(serving.engine, "step", held_step)
    stream = serving.submit(request("two", 1500, n=2))
    await anext(stream)
    stream.stop_choice(0)
    stream.stop_choice(0)
    go_on.set()
    await anext(stream)
    stream.stop_choice(1)
    async with asyncio.timeout(30):
        async for _ in stream:
            pass
    await idle(serving)


async def test_refusals_come_from_the_stream(serving: AsyncEngine) -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        await anext(serving.submit(request("r", 10_000)))
    with held(serving):
        streams = [serving.submit(request(f"q{i}", 5)) for i in range(20)]
    results = await asyncio.gather(*(anext(s) for s in streams), return_exceptions=True)
    refused = [isinstance(r, QueueFullError) for r in results]
    assert refused == [False] * 8 + [True] * 12
    for stream in streams:
        stream.close()
    await idle(serving)


async def test_with_nothing_left_to_go_on_with_it_is_refused_aloud(serving: AsyncEngine) -> None:
    sent = (ChoiceSoFar([4], finished=True), ChoiceSoFar([5], finished=True))
    stream = serving.submit(replace(request("over", n=2), sent=sent))
    with pytest.raises(RequestError, match="all choices have finished"):
        await read(stream)
    assert stream.has_ended


async def test_a_refused_twin_leaves_the_first_request_alone(serving: AsyncEngine) -> None:
    first = serving.submit(request("same", 40))
    twin = serving.submit(request("same", 40))
    twin.stop_choice(0)
    with pytest.raises(RequestError, match="request_id"):
        await anext(twin)
    twin.stop_choice(0)
    twin.close()
    async with asyncio.timeout(30):
        tokens, _ = await read(first)
    assert len(tokens) == 40
    await idle(serving)


async def test_a_stream_that_failed_does_not_end_its_ids_next_request(
    serving: AsyncEngine,
) -> None:
    refused = serving.submit(request("again", 10_000))
    with pytest.raises(RequestError, match="max_tokens"):
        await anext(refused)
    second = serving.submit(request("again", 40))
    refused.close()
    async with asyncio.timeout(30):
        tokens, _ = await read(second)
    assert len(tokens) == 40
    await idle(serving)


async def test_news_of_a_request_that_was_closed_are_not_its_ids_next_one_s(
    serving: AsyncEngine,
) -> None:
    """They may be on their way while the loop is busy."""
    alone, _ = await read(serving.submit(replace(request("alone"), prompt_token_ids=[9, 8, 7])))
    for _ in range(5):
        first = serving.submit(request("again", 1000))
        await anext(first)
        before = serving.engine.num_steps
        while serving.engine.num_steps < before + 3 and not serving.at_rest:
            time.sleep(0.0005)
        first.close()
        second = serving.submit(replace(request("again"), prompt_token_ids=[9, 8, 7]))
        assert (await read(second))[0] == alone


@pytest.mark.parametrize("which", ["launch", "finish"])
async def test_what_a_failed_step_had_goes_at_once(
    serving: AsyncEngine, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Its device may have no more memory, and Python looks for garbage seldom."""

    def fail(*_: object) -> None:
        of_the_step = torch.empty(1)
        gone.append(weakref.ref(of_the_step))
        raise RuntimeError("no more memory")

    gone: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(logging.getLogger("engine.engine"), "disabled", True)  # pytest keeps them
    monkeypatch.setattr(serving.engine._runner, which, fail)
    gc.disable()
    try:
        with pytest.raises(StepError):
            await read(serving.submit(request("unlucky")))
        assert gone[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("which", ["launch", "finish"])
async def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(
    serving: AsyncEngine, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    runner = serving.engine._runner
    whole = getattr(runner, which)

    def fail(*_: object) -> None:
        monkeypatch.setattr(runner, which, whole)
        raise RuntimeError("no more memory")

    monkeypatch.setattr(runner, which, fail)
    with pytest.raises(StepError, match="no more memory"):
        await read(serving.submit(request("unlucky")))
    tokens, _ = await read(serving.submit(request("next")))
    assert len(tokens) == 5
    serving.check_health()
    await idle(serving)


async def test_an_engine_that_fails_every_step_dies_of_it(
    serving: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU that is broken: it would fail all that came, and be taken for an idle one."""
    runner = serving.engine._runner
    launch, num_launched = runner.launch, 0

    def fail_but_the_ninth(*arguments: Any) -> Any:
        nonlocal num_launched
        num_launched += 1
        if num_launched == 9:
            return launch(*arguments)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(runner, "launch", fail_but_the_ninth)
    errors: list[type[EngineError]] = []
    async with asyncio.timeout(30):
        while EngineDiedError not in errors:
            try:
                await read(serving.submit(request(str(len(errors)), max_tokens=1)))
            except EngineError as error:
                errors.append(type(error))
    assert errors == [StepError] * 18 + [EngineDiedError]
    with pytest.raises(UnavailableError, match="its last 10 steps failed"):
        serving.check_health()
    told = [record.getMessage() for record in caplog.records if record.name == "engine.engine"]
    assert [line.split("failed, ")[1] for line in told] == ["and with it 0", "and with it 8"]


@pytest.mark.parametrize("bug", [KeyError("bug"), BaseException("bug")], ids=["bug", "panic"])
async def test_a_dead_thread_is_told_to_everyone(
    serving: AsyncEngine, monkeypatch: pytest.MonkeyPatch, bug: BaseException
) -> None:
    """A panic of a library's in Rust is no Exception."""

    def die() -> None:
        raise bug

    monkeypatch.setattr(serving.engine, "step", die)
    stream = serving.submit(request("last"))
    async with asyncio.timeout(30):
        with pytest.raises(EngineDiedError, match="bug"):
            await read(stream)
    with pytest.raises(UnavailableError):
        serving.check_health()
    with pytest.raises(EngineDiedError):
        await anext(serving.submit(request("too late")))


async def test_work_without_steps_is_said_to_whoever_asks_and_in_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model=str(folder), dtype="float32", kv_cache_memory_bytes=4 << 20)
    serving = AsyncEngine(Engine.create(config), stall_timeout_s=0.05)
    serving.start()
    serving.check_health()
    monkeypatch.setattr(serving.engine, "step", lambda: StepOutput({}, {}))
    stream = serving.submit(request("stuck"))
    async with asyncio.timeout(30):
        while "no step was made" not in caplog.text:
            await ask(serving, lambda engine: None)
    with pytest.raises(UnavailableError, match="no step was made"):
        serving.check_health()
    stream.close()
    await idle(serving)
    async with asyncio.timeout(30):
        while watchdog_sees_work(serving):
            await asyncio.sleep(0)
    serving.check_health()
    serving.stop()


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
async def test_a_step_is_late_by_what_it_should_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    now, launched, go_on = 0.0, threading.Event(), threading.Event()
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        kv_cache_memory_bytes=4 << 20,
        async_scheduling=ahead,
    )
    serving = AsyncEngine(Engine.create(config), now=lambda: now)
    serving.start()
    await read(serving.submit(request("first", 12)))
    await idle(serving)
    launch = serving.engine._runner.launch

    def slow(*args: Any) -> Any:
        launched.set()
        assert go_on.wait(30)
        return launch(*args)

    monkeypatch.setattr(serving.engine._runner, "launch", slow)
    serving.engine.step_times = StepTimes()
    for _ in range(64):
        serving.engine.step_times.note(StepShape(3, 0, 1, 4.5), 30.0)
    stream = serving.submit(request("slow", 1))
    assert await asyncio.to_thread(launched.wait, 30)
    now = 70.0
    serving.check_health()
    now = 100.0
    with pytest.raises(UnavailableError, match="no step was made for 100 s"):
        serving.check_health()
    go_on.set()
    await read(stream)
    async with asyncio.timeout(30):
        while watchdog_sees_work(serving):
            await asyncio.sleep(0)
    serving.check_health()
    serving.stop()


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
async def test_what_a_step_has_taken_so_far_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """A worker whose steps take longer than it is from one look at it to the next is busy."""
    launched, go_on = threading.Event(), threading.Event()
    config = EngineConfig(
        model=str(folder), dtype="float32", kv_cache_memory_bytes=4 << 20, async_scheduling=ahead
    )
    serving = AsyncEngine(Engine.create(config))
    serving.start()
    await read(serving.submit(request("first", 12)))
    await idle(serving)
    engine = serving.engine
    before_s = engine.steps_s
    assert engine.spent_s(time.perf_counter() + 9) == before_s  # it rests
    launch = engine._runner.launch

    def slow(*args: Any) -> Any:
        launched.set()
        assert go_on.wait(30)
        return launch(*args)

    monkeypatch.setattr(engine._runner, "launch", slow)
    began = time.perf_counter()
    stream = serving.submit(request("slow", 6))
    assert await asyncio.to_thread(launched.wait, 30)
    here = time.perf_counter()
    assert before_s + 9 <= engine.spent_s(here + 9) <= before_s + 9 + here - began
    assert engine.steps_s == before_s
    go_on.set()
    await read(stream)
    await idle(serving)
    assert before_s < engine.steps_s <= before_s + time.perf_counter() - began
    assert engine.spent_s(time.perf_counter() + 9) == engine.steps_s
    serving.stop()


async def test_who_follows_the_cache_is_told_of_every_batch(serving: AsyncEngine) -> None:
    log = serving.engine.events
    for number in range(3):
        latest = log.latest
        followers = [asyncio.ensure_future(serving.newer_events(latest)) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(one.done() for one in followers)
        prompt = [7 + number, *range(40)]
        ended = GenerationRequest(RequestId(str(number)), prompt, SamplingParams(max_tokens=1))
        await read(serving.submit(ended))
        async with asyncio.timeout(30):
            await asyncio.gather(*followers)
        assert log.latest > latest
        await serving.newer_events(latest)
    await idle(serving)


async def test_an_answer_that_was_whole_before_the_engine_stopped_is_read_after_it(
    serving: AsyncEngine,
) -> None:
    stream = serving.submit(request("read late", 3))
    await idle(serving)
    serving.stop()
    tokens, reasons = await read(stream)
    assert (len(tokens), reasons) == (3, [FinishReason.LENGTH])


async def test_stopping_fails_what_runs(
    serving: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = serving.engine.step

    def few_steps() -> StepOutput:
        return step() if serving.engine.num_steps < 100 else StepOutput({}, {})

    monkeypatch.setattr(serving.engine, "step", few_steps)
    stream = serving.submit(request("long", 1500))
    await anext(stream)
    serving.stop()
    with pytest.raises(UnavailableError, match="stopping"):
        async for _ in stream:
            pass
    with pytest.raises(UnavailableError, match="stopping"):
        await anext(serving.submit(request("late")))
