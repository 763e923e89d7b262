"""One answer's stream: what came of it and what ended it, each told once."""

import asyncio

import pytest

from cluster.session_stream import SessionStream
from engine.errors import UnavailableError
from engine.request import ChoiceSoFar, GenerationRequest, RequestId
from engine.sampling import SamplingParams
from protos.generation_pb2 import FINISH_REASON_STOP, ChoiceDelta
from protos.session_pb2 import RequestNews

GONE = UnavailableError("gone")


class Told:
    """What a stream with two choices tells its session and whoever submitted it."""

    def __init__(self, *sent: ChoiceSoFar) -> None:
        self.said: list[str] = []
        request = GenerationRequest(RequestId("r"), [1], SamplingParams(n=2), sent=sent)
        self.stream = SessionStream(
            request,
            lambda message: self.said.append(message.WhichOneof("kind") or ""),
            lambda stream: self.said.append("forget"),
        )
        self.stream.on_whole = lambda: self.said.append("whole")
        self.stream.on_failed = lambda: self.said.append("failed")

    def end(self, *choices: int) -> None:
        deltas = [
            ChoiceDelta(choice=one, token_ids=[5], finish_reason=FINISH_REASON_STOP)
            for one in choices
        ]
        self.stream.read(RequestNews(request_id="r", deltas=deltas))

    async def rest(self) -> list[int]:
        """The choices of which tokens are read until its end."""
        return [delta.choice async for update in self.stream for delta in update.deltas]


async def test_a_whole_answer_stays_so() -> None:
    told = Told()
    told.end(0)
    assert told.said == []
    told.end(1)
    assert told.said == ["forget", "whole"]
    told.stream.fail(GONE)
    told.stream.give_up(GONE)
    told.stream.stop_choice(1)
    told.stream.close()
    assert told.said == ["forget", "whole"]
    assert await told.rest() == [0, 1]


async def test_a_failure_is_told_at_once_and_read_after_what_came() -> None:
    told = Told()
    told.end(0)
    told.stream.fail(GONE)
    assert told.said == ["forget", "failed"]
    assert [delta.choice for delta in (await anext(told.stream)).deltas] == [0]
    with pytest.raises(UnavailableError, match="gone"):
        await anext(told.stream)
    assert await told.rest() == [], "it is raised once"
    told.stream.fail(GONE)
    told.stream.close()
    assert told.said == ["forget", "failed"]


async def test_what_is_given_up_is_cancelled_before_it_fails() -> None:
    told = Told()
    told.stream.give_up(GONE)
    assert told.said == ["cancel", "forget", "failed"]
    told.stream.give_up(GONE)
    assert told.said == ["cancel", "forget", "failed"]


async def test_choices_that_are_stopped_are_the_rest_of_the_answer() -> None:
    told = Told()
    told.stream.stop_choice(1)
    told.stream.stop_choice(1)
    assert told.said == ["stop_choice"]
    told.end(0)
    assert told.said == ["stop_choice", "forget", "whole"]
    told = Told()
    told.end(1)
    told.stream.stop_choice(0)
    assert told.said == ["stop_choice", "forget", "whole"]


async def test_a_stream_that_is_closed_is_cancelled_once() -> None:
    told = Told()
    told.stream.close()
    told.stream.close()
    assert told.said == ["cancel", "forget"]


async def test_a_choice_that_its_client_has_whole_is_not_waited_for() -> None:
    told = Told(ChoiceSoFar([5], finished=True), ChoiceSoFar([5]))
    told.end(1)
    assert told.said == ["forget", "whole"]
    assert await told.rest() == [1]


@pytest.mark.parametrize("end", ["fail", "close", "stop"])
async def test_its_reader_is_woken_by_its_end(end: str) -> None:
    told = Told()
    reading = asyncio.create_task(told.rest())
    await asyncio.sleep(0)
    if end == "fail":
        told.stream.fail(GONE)
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(reading, 30)
    else:
        for choice in (0, 1):
            told.stream.close() if end == "close" else told.stream.stop_choice(choice)
        assert await asyncio.wait_for(reading, 30) == []
