"""Calls that a model makes as it likes, of functions that are strict: their arguments fit."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cluster.openai.reading.formats import TOOL_FORMATS
from cluster.openai.reading.hermes import START
from engine.generation_defaults import GenerationDefaults
from engine.grammar.library import Vocabulary
from engine.grammar.value import Reasoning
from tests.cluster.conftest import make_server
from tests.cluster.reading.readers import TOOLS, read
from tests.cluster.test_structured_or_calls import CHAT, HI, model_of, spelt
from tests.engine.grammar.cases import spelt as spelt_by_bundled
from tests.engine.grammar.cases import vocabulary

PLACE = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "near": {"$ref": "#/$defs/Near"}},
    "required": ["at", "near"],
    "additionalProperties": False,
    "$defs": {"Near": {"type": "integer", "minimum": 0}},
}


def function(name: str, parameters: Any, strict: bool | None) -> dict[str, Any]:
    said = {"name": name, "parameters": parameters, "strict": strict}
    return {
        "type": "function",
        "function": {key: value for key, value in said.items() if value is not None},
    }


LOOK = function("look", PLACE, True)
BUY = function("buy", {"type": "object", "properties": {"set": {"uniqueItems": True}}}, None)


def fits(vocabulary: Vocabulary, grammar: Any, text: str) -> bool:
    state = vocabulary.compile(grammar).start(())
    problems = [state.accept(token) for token in spelt_by_bundled(text)]
    return problems == [None] * len(problems) and state.is_complete


def call(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


GOOD = call("look", {"at": "🦊", "near": 3})
BAD = (
    call("look", {"at": "x"}),
    call("look", {"at": "x", "near": -1}),
    call("seek", {}),
    '{"name": "look"}',
)


@pytest.mark.parametrize("parser", ["hermes", "granite", "nemotron", "hunyuan_a13b", "phi4_mini"])
async def test_a_strict_function_s_arguments_fit_where_it_is_called(parser: str) -> None:
    """And another one's are an object."""
    model = model_of(START, tool_parser=parser)
    server = make_server(model=model)
    calls = TOOL_FORMATS[parser].json
    assert calls is not None
    async with server.client:
        await server.ok(CHAT, messages=HI, tools=[LOOK, BUY])
        params = server.backend.last.params
        marks = [mark + behind for mark in calls.marks for behind in ("", "\n")]
        assert params.entries == spelt(model, *marks)
        assert (params.exits, params.reasoning) == ((), None)
        for text, is_right in (
            (GOOD, True),
            (call("buy", {"anything": []}), True),
            *((one, False) for one in BAD),
        ):
            said = f"[{text}]" if calls.in_array else text
            assert fits(vocabulary(), params.grammar, said) is is_right
            if is_right:  # as it is read
                found = read(TOOL_FORMATS[parser].make(TOOLS), [calls.marks[0] + said])
                assert [json.loads(arguments) for _, arguments in found[2]]
    model.grammar_trial.close()


@pytest.mark.parametrize(
    ("parser", "body"),
    [
        ("hermes", {"tools": [BUY]}),
        ("hermes", {"tools": [function("look", PLACE, False)]}),
        ("hermes", {"tools": [LOOK], "tool_choice": "none"}),
        ("qwen3_coder", {"tools": [LOOK]}),
        ("pythonic", {"tools": [LOOK]}),
        ("none", {"tools": [LOOK]}),
    ],
)
async def test_otherwise_nothing_holds_a_model(parser: str, body: dict[str, Any]) -> None:
    server = make_server(model=model_of(tool_parser=parser))
    async with server.client:
        await server.ok(CHAT, messages=HI, **body)
        params = server.backend.last.params
        assert (params.grammar, params.entries) == (None, ())


async def test_without_an_end_of_sequence_there_is_no_grammar() -> None:
    model = model_of()
    server = make_server(model=replace(model, defaults=GenerationDefaults()))
    async with server.client:
        await server.ok(CHAT, messages=HI, tools=[LOOK])
        assert server.backend.last.params.grammar is None


async def test_what_an_answer_must_fit_goes_first() -> None:
    model = model_of()
    server = make_server(model=model)
    async with server.client:
        await server.ok(CHAT, messages=HI, tools=[LOOK], response_format={"type": "json_object"})
        params = server.backend.last.params
        assert (params.entries, params.exits) == ((), spelt(model, START))
    model.grammar_trial.close()


@pytest.mark.parametrize(
    ("marks", "is_open", "begins"),
    [
        (("<think>", "</think>"), False, ("<think>",)),
        (("<think>", "</think>"), True, ()),
        ((), True, None),
    ],
)
async def test_reasoning_about_calls_calls_nothing(
    marks: tuple[str, ...], is_open: bool, begins: tuple[str, ...] | None
) -> None:
    """Where it is known where that ends; without that nothing is held."""
    model = model_of(*marks, reasoning_parser="think")
    server = make_server(model=model)
    async with server.client:
        await server.ok(CHAT, messages=HI, tools=[LOOK], chat_template_kwargs={"open": is_open})
        params = server.backend.last.params
        if begins is None:
            assert (params.grammar, params.entries) == (None, ())
        else:
            (end,) = spelt(model, "</think>")[0]
            assert params.entries
            assert params.reasoning == Reasoning(end, sum(spelt(model, *begins), ()))
    model.grammar_trial.close()


@pytest.mark.parametrize(
    ("parameters", "status"),
    [
        ({"type": "object", "properties": {"a": {"uniqueItems": True}}}, 422),
        ({"type": "array"}, 400),
    ],
)
async def test_a_schema_that_cannot_be_kept_is_named(parameters: Any, status: int) -> None:
    model = model_of()
    server = make_server(model=model)
    async with server.client:
        tools = [BUY, function("look", parameters, True)]
        response = await server.post(CHAT, messages=HI, tools=tools)
        assert response.status_code == status
        where = "tools[1].function.parameters" if status == 422 else "tools"
        assert response.json()["error"]["param"] == where
    model.grammar_trial.close()


async def test_with_one_call_at_a_time_an_array_has_one() -> None:
    model = model_of(tool_parser="granite")
    server = make_server(model=model)
    async with server.client:
        for parallel in (True, False):
            await server.ok(CHAT, messages=HI, tools=[LOOK], parallel_tool_calls=parallel)
            two = f"[{GOOD}, {GOOD}]"
            assert fits(vocabulary(), server.backend.last.params.grammar, two) is parallel
    model.grammar_trial.close()
