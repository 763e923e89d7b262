"""A stop string found late: the engine's stream has told more by the time it is read."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.commands.generate import _answer
from cluster.openai.generation import Generation
from cluster.openai.plan import AnswerOptions, Plan, Prompt
from engine.async_streams import EngineStream
from engine.request import ChoiceDelta, FinishReason, GenerationUpdate, PromptReport, RequestId
from engine.sampling import SamplingParams
from tests.cluster.fakes import small_model, small_tokenizer


class Commands:
    """Takes the place of the engine's thread, and notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call(self, command: Any) -> None:
        self.calls.append(command)

    def forget(self, stream: Any) -> None:
        pass


async def test_a_choice_that_both_sides_ended_is_ended_once() -> None:
    """Choice 0 says its stop string and ends by itself in one merged update; choice 1 goes on
    and must be heard to its end."""
    commands = Commands()
    stream = EngineStream(commands, RequestId("r"), range(2))
    params = SamplingParams(n=2, stop=("fox",))
    generation = Generation(
        stream,
        small_tokenizer().visible_pieces,
        Prompt([1]),
        params,
        AnswerOptions(),
        first_choice=0,
    )
    encode = small_tokenizer().encode
    stream.push(GenerationUpdate([ChoiceDelta(0, encode("a fox"))], PromptReport(0)))
    stream.push(GenerationUpdate([ChoiceDelta(0, encode("!"), None, FinishReason.LENGTH)]))
    parts = generation.parts()
    first = await anext(parts)
    assert [(part.text, part.finish_reason, part.stop_reason) for part in first] == [
        ("a ", FinishReason.STOP, "fox")
    ]
    waiting = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0)
    stream.push(GenerationUpdate([ChoiceDelta(1, encode("bee"), None, FinishReason.LENGTH)]))
    assert [part.text for part in await waiting] == ["bee"]
    assert [part async for part in parts] == []
    assert commands.calls == []


@pytest.mark.parametrize("stream", [False, True])
async def test_generate_shows_every_step_of_those_that_were_read_as_one(
    capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    steps = EngineStream(Commands(), RequestId("r"), range(1))
    encode = small_tokenizer().encode
    steps.push(GenerationUpdate([ChoiceDelta(0, encode("a quick "))], PromptReport(0)))
    steps.push(GenerationUpdate([ChoiceDelta(0, encode("brown "))]))
    steps.push(GenerationUpdate([ChoiceDelta(0, encode("fox"), None, FinishReason.LENGTH)]))
    engine = SimpleNamespace(backend=SimpleNamespace(submit=lambda request: steps))
    plan = Plan((Prompt([1]),), SamplingParams(), AnswerOptions())
    await _answer(cast("Any", engine), small_model(), plan, stream=stream)
    assert capsys.readouterr().out == "a quick brown fox\n"
