"""`tool_choice`: answers that must be calls, by a grammar and read as what it allows."""

import json
from typing import Any

import pytest

from cluster.openai.tool_choice import ToolChoice, compact
from engine.errors import RequestError
from engine.generation_defaults import GenerationDefaults
from engine.grammar.library import Vocabulary
from engine.grammar.value import Grammar, GrammarKind
from tests.cluster.fakes import small_tokenizer
from tests.cluster.test_tools import HELLO, PATH, TOOLS, message_of_events, server_that_says

ENDS = GenerationDefaults(eos_token_ids=(small_tokenizer().eos_token_id or 0,))
NUMBER = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def schema_of(choice: ToolChoice, *, one_call: bool = False) -> dict[str, Any]:
    return choice.schema(choice.schemas, in_array=True, one_call=one_call)


def test_a_named_function_s_arguments_are_the_answer() -> None:
    schema = {**NUMBER, "$defs": {"N": {"type": "integer"}}}
    choice = ToolChoice.read([tool("a"), tool("b", schema)], named("b"))
    assert schema_of(choice) == schema
    nothing = schema_of(ToolChoice.read([tool("a")], named("a")))
    assert (nothing["properties"], nothing["additionalProperties"]) == ({}, False)


def test_required_calls_are_an_array() -> None:
    tools = [tool("a", {"properties": {"n": {"type": "integer"}}}), tool("b")]
    schema = schema_of(ToolChoice.read(tools, "required"), one_call=True)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    calls = schema["items"]["anyOf"]
    assert [call["properties"]["name"] for call in calls] == [{"const": "a"}, {"const": "b"}]
    assert "maxItems" not in schema_of(ToolChoice.read(tools, "required"))


def fits(tools: list[Any], choice: Any, answer: Any) -> bool:
    """By the grammar that the model would be held to, and as a whole answer."""
    schema = schema_of(ToolChoice.read(tools, choice))
    small, (end,) = small_tokenizer(), ENDS.eos_token_ids
    vocabulary = Vocabulary(small.to_json(), small.vocab_size, (end,))
    state = vocabulary.compile(Grammar(GrammarKind.JSON_SCHEMA, compact(schema))).start(())
    tokens = [*small.encode(json.dumps(answer), add_special_tokens=False), end]
    return all(state.accept(token) is None for token in tokens)


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    fields = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**fields, "required": list(required)}


POINT = closed("lat", lat={"type": "number"})
ROOT_OF_ITS_OWN = {
    "$id": "https://a/c",
    "$defs": {"Q": {"type": "integer"}},
    **closed("q", q={"$ref": "#/$defs/Q"}),
}


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        *(
            (
                closed("v", v={"type": "integer"}, child={"$ref": root}),
                {"v": 1, "child": {"v": 2}},
                {"v": 1, "child": [{"name": "f", "arguments": {"v": 2}}]},
            )
            for root in ("#", "")
        ),
        (
            closed("from", "to", **{"from": POINT, "to": {"$ref": "#/properties/from"}}),
            {"from": {"lat": 1}, "to": {"lat": 2}},
            {"from": {"lat": 1}, "to": {}},
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#/definitions/Point",
                "definitions": {"Point": POINT},
            },
            {"lat": 1},
            {},
        ),
        (
            {"$id": "https://a/b", **closed("p", p={"$ref": "#/$defs/P"}), "$defs": {"P": POINT}},
            {"p": {"lat": 1}},
            {"p": 1},
        ),
        (
            {**closed("p", p=ROOT_OF_ITS_OWN), "$defs": {"Q": {"type": "null"}}},
            {"p": {"q": 1}},
            {"p": {"q": None}},
        ),
        (
            closed("const", "$ref", **{"const": {"anyOf": [{"$ref": "#/$defs/N"}]}, "$ref": {}})
            | {"$defs": {"N": {"enum": [{"$ref": "#"}, 1], "default": {"$ref": "#/x"}}}},
            {"const": {"$ref": "#"}, "$ref": "#"},
            {"const": {"$ref": "#/$defs/1"}, "$ref": "#"},
        ),
        ({"$defs": {"P": POINT}, **closed("p", p={"$ref": "#/$defs/P"})}, {"p": {"lat": 1}}, {}),
    ],
    ids=["root", "nothing", "property", "draft 7", "id", "inner id", "names and data", "$defs"],
)
def test_references_mean_the_same_wherever_a_schema_is(
    parameters: Any, right: Any, wrong: Any
) -> None:
    """Also beside a tool that means something else by the same names."""
    null = {"type": "null"}
    other = {**closed(p={"$ref": "#/$defs/P"}, **{"from": null}), "$defs": {"P": null, "N": null}}
    tools = [tool("g", other), tool("f", parameters)]
    for arguments, expected in ((right, True), (wrong, False)):
        assert fits(tools, named("f"), arguments) is expected
        assert fits(tools, "required", [{"name": "f", "arguments": arguments}]) is expected


@pytest.mark.parametrize(
    ("strict", "fits_it"), [({}, True), ({"strict": False}, True), ({"strict": True}, False)]
)
def test_what_a_grammar_cannot_keep_is_passed_over_unless_the_tool_is_strict(
    strict: dict[str, bool], fits_it: bool
) -> None:
    """Pydantic's sets."""
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    function = {"name": "f", "parameters": closed("n", n=numbers), **strict}
    tools = [tool("g"), {"type": "function", "function": function}]
    if not fits_it:
        with pytest.raises(RequestError, match="uniqueItems"):
            fits(tools, named("f"), {"n": [1]})
        return
    assert fits(tools, named("f"), {"n": [1]})
    assert fits(tools, "required", [{"name": "f", "arguments": {"n": [1]}}])
    assert not fits(tools, "required", [{"name": "f", "arguments": {"n": ["1"]}}])


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        (None, "required", "tool_choice"),
        (None, named("a"), "tool_choice"),
        ([tool("a")], named("b"), "tool_choice"),
        ([tool("a")], "any", "tool_choice"),
        ([tool("a")], {"type": "function"}, "tool_choice"),
        ([tool("a")], {"type": "function", "function": {"name": 1}}, "tool_choice"),
        ([tool("a")], {"type": "allowed_tools", "function": {"name": "a"}}, "tool_choice"),
        ([tool("a")], named("a") | {"function": {"name": "a", "x": 1}}, "tool_choice"),
        ([tool("b"), tool("a", {"type": "array"})], "required", "tools"),
    ],
)
def test_choices_that_cannot_be_met(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        schema_of(ToolChoice.read(tools, choice))
    assert caught.value.field == field


@pytest.mark.parametrize("per_step", [1, 4, 1000])
async def test_answers_are_read_as_the_grammar_has_them(per_step: int) -> None:
    """Also of a model that would reason first, and has a mark of its own for calls."""
    text = '[{"name": "look", "arguments": {"at": "🦊"}},\n{"name":"buy","arguments":{}}]'
    server = server_that_says(text, per_step, defaults=ENDS)
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    (choice,) = (await server.ok(PATH, **body))["choices"]
    grammar = server.backend.last.params.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar.text)["type"] == "array"
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    expected = [("look", '{"at": "🦊"}'), ("buy", "{}")]
    for message in (choice["message"], message_of_events(await server.events(PATH, **body))[0]):
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
        assert calls == expected


@pytest.mark.parametrize("num_tokens", [1, 5, 8, 30, 40])
async def test_what_is_cut_short_of_a_call_is_no_content(num_tokens: int) -> None:
    text = '[{"name": "look", "arguments": {"at": "x"}},\n{"name":"buy","arguments":{}}]'
    server = server_that_says(text, defaults=ENDS)
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": num_tokens}
    (choice,) = (await server.ok(PATH, **body))["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    message, _ = message_of_events(await server.events(PATH, **body))
    assert not message.get("content")


async def test_a_named_function_is_the_only_call() -> None:
    server = server_that_says(' {"at": [1, 2]}', defaults=ENDS)
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": named("look")}
    (choice,) = (await server.ok(PATH, **body))["choices"]
    assert choice["finish_reason"] == "stop", "as OpenAI has it where the function is named"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": [1, 2]}'}
    message, _ = message_of_events(await server.events(PATH, **body))
    assert [call["function"] for call in message["tool_calls"]] == [call["function"]]


async def test_it_goes_with_no_other_grammar() -> None:
    server = server_that_says("{}")
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    response = await server.post(PATH, **body, response_format={"type": "json_object"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("choice", ["required", named("b")])
@pytest.mark.parametrize(
    ("status", "schema"),
    [(422, {"properties": {"n": {"type": "none"}}}), (400, {"description": "x" * 70_000})],
)
async def test_of_many_tools_the_one_is_named_that_no_grammar_can_be_made_of(
    choice: Any, status: int, schema: dict[str, Any]
) -> None:
    server = server_that_says("{}", defaults=ENDS)
    tools = [tool("a", NUMBER | {"$defs": {"N": {"type": "integer"}}}), tool("b", schema)]
    response = await server.post(PATH, messages=HELLO, tools=tools, tool_choice=choice)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, "tools[1].function.parameters"), error


@pytest.mark.parametrize("strict", [None, True])
async def test_all_of_them_are_no_larger_than_a_grammar_may_be(strict: bool | None) -> None:
    """What would be left out of them where they are not strict counts."""
    server = server_that_says("{}", defaults=ENDS)
    tools = [tool(name, {"not": {"description": "x" * 40_000}}) for name in "ab"]
    for one in tools:
        one["function"]["strict"] = strict
    response = await server.post(PATH, messages=HELLO, tools=tools, tool_choice="required")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
