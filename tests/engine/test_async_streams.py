"""What a request's reader is told, and what a stream asks of its engine, without one."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from engine.async_streams import Command, EngineStream, HandOverStream, RequestStream
from engine.errors import StepError
from engine.handoff import FirstToken, PromptChunk, PromptEnd
from engine.request import (
    ChoiceDelta,
    FinishReason,
    GenerationUpdate,
    PromptReport,
    RequestId,
)
from kv_cache.handover import HeldRange

R = RequestId("r")


class FakeThread:
    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.num_forgotten = 0

    def call(self, command: Command) -> None:
        self.commands.append(command)

    def forget(self, stream: RequestStream[Any]) -> None:
        self.num_forgotten += 1


@pytest.fixture
def no_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


def update(token: int, choice: int = 0, last: bool = False, first: bool = False) -> Any:
    reason = FinishReason.LENGTH if last else None
    report = PromptReport(token) if first else None
    return GenerationUpdate([ChoiceDelta(choice, [token], None, reason)], report)


def chunk(start: int) -> PromptChunk:
    return PromptChunk(HeldRange(start, start + 8, (), ()))


async def test_what_came_while_nobody_read_is_one_update() -> None:
    stream = EngineStream(FakeThread(), R, [0, 1])
    for news in (update(5, first=True), update(6, 1), update(7, last=True)):
        stream.push(news)
    told = stream.take()
    assert told is not None
    assert [(delta.choice, delta.token_ids) for delta in told.deltas] == [
        (0, [5]),
        (1, [6]),
        (0, [7]),
    ]
    assert told.prompt == PromptReport(5)
    assert stream.take() is None
    assert not stream.has_ended, "the other choice goes on"


@pytest.mark.parametrize("handed_over", [False, True])
async def test_an_error_comes_once_after_all_that_came_before(handed_over: bool) -> None:
    thread = FakeThread()
    stream: RequestStream[Any] = EngineStream(thread, R, [0])
    if handed_over:
        stream = HandOverStream(thread, R)
    first = chunk(0) if handed_over else update(5)
    ended = [stream.has_ended]
    stream.push(first)
    stream.fail(StepError("no more memory"))
    ended.append(stream.has_ended)
    assert stream.take() == first
    ended.append(stream.has_ended)
    with pytest.raises(StepError, match="no more memory"):
        stream.take()
    assert ended == [False] * 3
    assert stream.take() is None
    assert stream.has_ended
    async with asyncio.timeout(30):
        await stream.wait()


@pytest.mark.parametrize("end", ["told", "stopped", "failed", "closed"])
async def test_nobody_waits_for_what_has_ended(end: str) -> None:
    stream, heard = EngineStream(FakeThread(), R, [0]), 0

    def hear() -> None:
        nonlocal heard
        heard += 1

    stream.listen(hear)
    stream.push(update(1))
    assert (stream.take(), heard) == (update(1), 1)
    assert stream.take() is None
    waiting = asyncio.ensure_future(stream.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    match end:
        case "told":
            stream.push(update(2, last=True))
        case "stopped":
            stream.stop_choice(0)
        case "failed":
            stream.fail(StepError("no"))
        case "closed":
            stream.close()
    assert heard == 2
    async with asyncio.timeout(30):
        await waiting
        assert stream.has_ended is (end in ("stopped", "closed")), "something is to be taken"
        if end == "failed":
            with pytest.raises(StepError):
                stream.take()
        else:
            assert (stream.take() is None) is (end != "told")
        assert stream.take() is None
        assert stream.has_ended
        await stream.wait()


@pytest.mark.usefixtures("no_collector")
async def test_a_closed_stream_stays_for_neither_its_time_nor_its_listener() -> None:
    """Time is ten minutes by default, and tokens may be a hundred thousand."""
    thread = FakeThread()
    stream = EngineStream(thread, R, [0])
    stream.end_after(600)
    stream.listen(lambda one=stream: one.take())  # type: ignore[misc]
    left = weakref.ref(stream)
    stream.close()
    stream.close()
    assert thread.num_forgotten == 1
    del stream
    assert left() is None


async def test_what_nobody_read_of_a_prompt_is_let_go_and_no_more() -> None:
    thread = FakeThread()
    stream = HandOverStream(thread, R)
    stream.push(chunk(0))
    assert stream.take() == chunk(0)
    stream.push(chunk(8))
    stream.push(chunk(16))
    stream.push(PromptEnd((FirstToken(1),), 0))
    stream.fail(StepError("the engine died"))
    stream.close()
    stream.close()
    dropped: list[object] = []

    class Dropping:
        def drop_holds(self, holds: object) -> None:
            dropped.append(holds)

    for command in thread.commands:
        command(Dropping())  # type: ignore[arg-type]
    assert len(dropped) == 2
    assert stream.take() is None, "nor is there an error"
    assert stream.has_ended
