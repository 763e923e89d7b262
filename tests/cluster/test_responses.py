"""/v1/responses: a chat's answer in items, whole and in events; the official client reads both."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from cluster import response_answer
from cluster.openai import events as of_streams
from cluster.openai.responses.items import messages_of, seal
from cluster.openai.responses.tools import Tools
from engine.errors import EngineError, UnavailableError
from engine.request import GenerationRequest
from tests.cluster.conftest import Server, make_server
from tests.cluster.fakes import (
    ANSWER,
    CACHED,
    Step,
    answer_tokens,
    say,
    small_model,
    small_tokenizer,
)
from tests.cluster.live_server import LiveServer, live_server
from tests.cluster.test_bad_input import refused
from tests.cluster.test_chat import HELLO_PROMPT, prompt_of
from tests.cluster.test_structured import EOS
from tests.cluster.test_tools import ANSWER as THOUGHTS_AND_CALLS
from tests.cluster.test_tools import BUY as CALL_BUY
from tests.cluster.test_tools import LOOK as CALL_LOOK
from tests.cluster.test_tools import TOOLS as CHAT_TOOLS
from tests.cluster.test_tools import model_that_thinks, server_that_says

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: Any = [{"type": "function", "strict": None, **tool["function"]} for tool in CHAT_TOOLS]
LOOK, BUY = '{"at": "🦊"}', "{}"


def read_events(text: str) -> list[dict[str, Any]]:
    """Named, numbered, and as the official client knows them."""
    assert text.endswith("\n\n")
    events = []
    for number, frame in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


async def events_of(server: Server, **body: Any) -> list[dict[str, Any]]:
    response = await server.post(PATH, stream=True, **body)
    assert response.status_code == 200, response.text
    return read_events(response.text)


def without_ids(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def put_together(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as a client has them that believes nothing but the deltas."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response.").split("."):
            case ["output_item", "added"]:
                assert event["output_index"] == len(items)
                assert event["item"]["status"] == "in_progress"
                items.append(event["item"])
            case ["content_part", "added"]:
                assert event["content_index"] == len(items[-1]["content"]) == 0
                items[-1]["content"].append(event["part"])
            case ["function_call_arguments", "delta"]:
                items[-1]["arguments"] += event["delta"]
            case ["output_text", "delta"]:
                items[-1]["content"][0]["text"] += event["delta"]
                items[-1]["content"][0]["logprobs"] += event["logprobs"]
            case ["reasoning_text", "delta"]:
                items[-1]["content"][0]["text"] += event["delta"]
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
    return items


async def test_a_whole_answer_is_that_of_a_chat(server: Server) -> None:
    answer = await server.ok(
        PATH, model="tiny", input="Hello", temperature=0.5, metadata={"a": "b"}
    )
    assert prompt_of(server) == HELLO_PROMPT
    params = server.backend.last.params
    await server.ok(CHAT, messages=[{"role": "user", "content": "Hello"}], temperature=0.5, seed=7)
    assert server.backend.last.params.max_tokens == params.max_tokens
    response = Response.model_validate(answer)
    assert (answer["object"], answer["status"], answer["model"]) == (
        "response",
        "completed",
        "small",
    )
    assert response.id.startswith("resp_")
    assert response.output_text == ANSWER
    (message,) = answer["output"]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert (answer["temperature"], answer["metadata"], answer["store"]) == (0.5, {"a": "b"}, False)
    num_prompt = len(small_tokenizer().encode(HELLO_PROMPT))
    assert answer["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": CACHED, "cache_write_tokens": 0},
        "output_tokens": len(answer_tokens()),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + len(answer_tokens()),
    }


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_streamed_and_not_the_items_are_the_same(per_step: int) -> None:
    server = server_that_says(THOUGHTS_AND_CALLS, per_step)
    asked: Any = {"input": "Hello", "tools": TOOLS}
    whole = await server.ok(PATH, **asked)
    thought, message, look, buy = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I look."
    assert (look["name"], look["arguments"]) == ("look", LOOK)
    assert (buy["name"], buy["arguments"]) == ("buy", BUY)
    assert len({item["id"] for item in whole["output"]} | {look["call_id"], buy["call_id"]}) == 6
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert (whole["tools"], whole["tool_choice"]) == (TOOLS, "auto")

    events = await events_of(server, **asked)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert all(event["response"]["output"] == [] for event in events[:2])
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    assert kinds[-1] == "response.completed"
    last = events[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert last["usage"] == whole["usage"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for item in (built := put_together(events)):
        item["status"] = "completed"
    assert built == last["output"]


BETWEEN_CALLS = (
    f"<think>\nHm.\n</think>\n\nFirst\n<tool_call>{CALL_LOOK}</tool_call>\nthen"
    f"<tool_call>{CALL_BUY}</tool_call>\nlast."
)


@pytest.mark.parametrize("per_step", [1, 21, 22, 31, 1000])
async def test_items_come_in_the_order_of_the_text_however_it_is_cut(per_step: int) -> None:
    server = server_that_says(BETWEEN_CALLS, per_step)
    items = put_together(await events_of(server, input="Hello", tools=TOOLS))
    said = [item.get("arguments") or item["content"][0]["text"] for item in items]
    assert said == ["Hm.", "First", LOOK, "\nthen", BUY, "\nlast."]
    whole = (await server.ok(PATH, input="Hello", tools=TOOLS))["output"]
    assert [item.get("arguments") or item["content"][0]["text"] for item in whole] == said


async def test_text_between_calls_goes_back_as_one_turn() -> None:
    """As the chat has it: templates want the results right behind the calls."""
    server = server_that_says(BETWEEN_CALLS)
    hello = {"role": "user", "content": "Hello"}
    output = (await server.ok(PATH, input="Hello", tools=TOOLS))["output"]
    (choice,) = (await server.ok(CHAT, messages=[hello], tools=CHAT_TOOLS))["choices"]
    _, turn, result = messages_of(
        None,
        [hello, *output, {"type": "function_call_output", "call_id": "1", "output": "done"}],
    )
    for name in ("role", "content", "reasoning_content"):
        assert turn[name] == choice["message"][name]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [call["function"] for call in turn["tool_calls"]] == calls
    assert result["role"] == "tool"


def test_what_is_thought_between_a_text_and_a_call_is_of_their_turn() -> None:
    """As gpt-oss does, whose template would have the text as a last answer without the call."""
    user, text, call = TURNS[0], TURNS[3], TURNS[4]
    first, second = (
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("Hm.", "So.")
    )
    _, turn = messages_of(None, [user, first, text, second, call])
    assert (turn["reasoning_content"], turn["content"]) == ("Hm.So.", "b")
    assert len(turn["tool_calls"]) == 1
    _, one, other = messages_of(None, [user, first, text, second, text])
    assert (one["reasoning_content"], other["reasoning_content"]) == ("Hm.", "So.")
    assert [turn["role"] for turn in messages_of(None, [second, call])] == ["assistant"]


async def test_an_answer_that_is_cut_off_says_so(server: Server) -> None:
    whole = await server.ok(PATH, input="Hello", max_output_tokens=2)
    assert (whole["status"], whole["completed_at"]) == ("incomplete", None)
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"
    events = await events_of(server, input="Hello", max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    server = make_server(say(""))
    (message,) = (await server.ok(PATH, input="Hello"))["output"]
    assert message["content"][0]["text"] == ""
    assert put_together(await events_of(server, input="Hello"))[0]["content"] == message["content"]


async def test_logprobs_stand_with_the_text() -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "input": "Hello"}
    server = make_server(say())
    whole = await server.ok(PATH, **asked)
    (part,) = whole["output"][0]["content"]
    chat = await server.ok(
        CHAT, messages=[{"role": "user", "content": "Hello"}], logprobs=True, top_logprobs=2
    )
    said = chat["choices"][0]["logprobs"]["content"]
    # Chat tells of the end's token besides, and of those in the middle of a character.
    assert [entry for entry in said if entry in part["logprobs"]] == part["logprobs"]
    assert len(part["logprobs"]) > 5
    (streamed,) = put_together(await events_of(server, **asked))
    assert streamed["content"] == [part]
    error = await refused(server, PATH, {"input": "x", "top_logprobs": 2})
    assert error["param"] == "top_logprobs"


async def test_what_has_all_logprobs_is_written_beside_the_loop_event_by_event(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, beside = threading.get_ident(), []

    def dump(event: Any) -> str:
        if threading.get_ident() != loop:
            beside.append(event["type"].removeprefix("response."))
        return of_streams.dump(event)

    monkeypatch.setattr(response_answer, "dump", dump)
    await events_of(server, input="Hello")
    assert beside == ["completed"]
    await events_of(server, input="Hello", include=["message.output_text.logprobs"])
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert beside[-4:] == ends


TURNS: list[Any] = [
    {"role": "user", "content": "a"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}", "status": None},
    {"type": "function_call", "call_id": "2", "name": "buy", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "c"},
    {
        "type": "function_call_output",
        "call_id": "2",
        "output": [{"type": "input_text", "text": "d"}, {"type": "input_text", "text": "e"}],
    },
    {"role": "assistant", "content": "f"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "g"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "h"}]},
    {"type": "reasoning", "summary": [], "encrypted_content": seal("ü")},
]


def test_items_are_the_turns_of_a_chat() -> None:
    def call(call_id: str, name: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}

    assert messages_of(None, TURNS) == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "b",
            "tool_calls": [call("1", "look"), call("2", "buy")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        {"role": "tool", "tool_call_id": "2", "content": "de"},
        {"role": "assistant", "content": "f"},
        {"role": "assistant", "content": "g"},
        {"role": "assistant", "reasoning_content": "h"},
        {"role": "assistant", "reasoning_content": "ü"},
    ]


def test_items_are_taken_as_openai_gave_them() -> None:
    """And as its client does, that adds what it has parsed to an answer."""
    direct, mark = {"type": "direct"}, {"mode": "explicit", "ttl": "30m"}
    ours: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
    ]
    theirs: list[Any] = [{**item, "created_by": "x", "status": "completed"} for item in ours]
    theirs[0]["content"] = [{**ours[0]["content"][0], "prompt_cache_breakpoint": mark}]
    part = {"type": "output_text", "text": "b", "annotations": [], "parsed": {"a": 1}}
    theirs[1] |= {"phase": "commentary", "content": [part]}
    theirs[2] |= {"caller": direct, "async": False, "parsed_arguments": {"a": 1}}
    theirs[3] |= {"caller": direct, "namespace": None}
    assert messages_of(None, theirs) == messages_of(None, ours)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("x", [("system", "s"), ("user", "x")]),
        ([{"role": "developer", "content": one} for one in "de"], [("system", "s\n\nd\n\ne")]),
        (
            [{"role": "user", "content": "x"}, {"role": "system", "content": "d"}],
            [("system", "s"), ("user", "x"), ("system", "d")],
        ),
    ],
)
def test_instructions_come_first(given: Any, expected: list[tuple[str, str]]) -> None:
    turns = [(turn["role"], turn["content"]) for turn in messages_of("s", given)]
    assert turns == expected


def test_what_the_system_says_at_the_beginning_is_one_message() -> None:
    said = [{"role": role, "content": role[:1]} for role in ("developer", "system", "user")]
    assert [turn["content"] for turn in messages_of(None, said)] == ["d\n\ns", "u"]
    assert messages_of(None, said[:1]) == [{"role": "developer", "content": "d"}]


SPACE: Any = {"type": "namespace", "name": "shop", "description": "A shop.", "tools": TOOLS}
IN_SPACE = THOUGHTS_AND_CALLS.replace('"look"', '"shop.look"').replace('"buy"', '"shop.buy"')


async def test_functions_of_a_namespace_are_called_by_both_names() -> None:
    server = server_that_says(IN_SPACE)
    tools = [{"type": "function", "name": "look"}, SPACE]
    answer = await server.ok(PATH, input="Hello", tools=tools)
    Response.model_validate(answer)
    look, buy = answer["output"][2:]
    assert (look["namespace"], look["name"]) == ("shop", "look")
    assert (buy["namespace"], buy["name"]) == ("shop", "buy")
    assert "look" in prompt_of(server)
    (turn,) = messages_of(None, [look, buy])
    names = [call["function"]["name"] for call in turn["tool_calls"]]
    assert names == ["shop.look", "shop.buy"]
    assert [one["function"].get("description") for one in Tools.read(tools).functions] == [
        None,
        "A shop.",
        None,
    ]
    wrong: Any = {**SPACE, "tools": [TOOLS[0], {"type": "function", "name": "a b"}]}
    error = await refused(server, PATH, {"input": "x", "tools": [TOOLS[0], wrong]})
    assert error["param"] == "tools[1].tools[1].name"


async def test_the_choice_of_a_function_in_a_namespace_has_the_name_that_the_model_knows() -> None:
    model = replace(model_that_thinks(), defaults=EOS)
    server = make_server(say("{}"), model)
    choice = {"type": "function", "name": "shop.look"}
    answer = await server.ok(PATH, input="Hello", tools=[SPACE], tool_choice=choice)
    *_, call = answer["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("shop", "look", "{}")
    assert server.backend.last.params.grammar is not None
    model.grammar_trial.close()


@pytest.mark.parametrize("sealed", [False, True])
async def test_an_answer_goes_back_as_it_came(sealed: bool) -> None:
    """Clients may drop the reasoning's text where they asked for something to send in its place."""
    server = server_that_says(THOUGHTS_AND_CALLS)
    include = ["reasoning.encrypted_content"] if sealed else None
    output = (await server.ok(PATH, input="Hello", tools=TOOLS, include=include))["output"]
    assert ("encrypted_content" in output[0]) == sealed
    if sealed:
        del output[0]["content"]
    sent = [{"role": "user", "content": "Hello"}, *output]
    _, turn = messages_of(None, sent)
    assert (turn["reasoning_content"], turn["content"]) == ("Hm.", "I look.")
    assert [call["id"] for call in turn["tool_calls"]] == [item["call_id"] for item in output[2:]]
    await server.ok(PATH, input=sent, tools=TOOLS)


MESSAGE = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "nothing"}}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [MESSAGE] * 4097}, "input"),
    ({"input": [MESSAGE, 1]}, "input[1]"),
    ({"input": [{"type": "message", "role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [1]}]}, "input[0].content[0]"),
    ({"input": [{**MESSAGE, "extra": 1}]}, "input[0].extra"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "a"}]}, "input[0].arguments"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
    ),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]},
        "input[0].encrypted_content",
    ),
    (
        {"input": [{**TURNS[6], "caller": {"type": "program"}}]},
        "input[0].caller.type",
    ),
    ({"input": "x" * 5000}, "input"),
    ({"input": [{"role": "bad", "content": "x"}]}, "input[0].role"),
    ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "a"}]}, "tools[0].type"),
    ({"tools": [{**TOOLS[0], "unheard": 1}]}, "tools[0].unheard"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [1]}]}, "tools[0].tools[0]"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "a" * 129, "tools": []}]}, "tools[0].name"),
    ({"tools": TOOLS}, "tools"),  # of which this model's template knows nothing
    ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"n": 2}, "n"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"messages": [MESSAGE]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[param for _, param in WRONG])
async def test_what_is_wrong_is_named_as_the_client_wrote_it(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    error = await refused(server, PATH, {"input": "Hello", **fields})
    assert error["param"] == param
    assert param in error["message"]


async def test_too_many_logprobs_are_named() -> None:
    server = make_server(model=replace(small_model(), max_model_len=1 << 20))
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    error = await refused(server, PATH, {"input": "x", **asked})
    assert error["param"] == "top_logprobs"


async def test_a_schema_that_nothing_can_be_made_of_is_named() -> None:
    server = server_that_says("{}")
    schema = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    error = await refused(server, PATH, {"input": "x", "text": {"format": schema}}, 422)
    assert error["param"] == "text.format.schema"
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    body = {"input": "x", "tools": tools, "tool_choice": "required"}
    assert (await refused(server, PATH, body, 422))["param"] == "tools[0].parameters"


def breaks_off(error: EngineError) -> Any:
    def script(request: GenerationRequest) -> Iterator[Step]:
        yield from list(say()(request))[:3]
        yield error

    return script


async def test_a_stream_that_fails_says_so_and_what_came() -> None:
    server = make_server(breaks_off(UnavailableError("the worker is gone")))
    *begun, error, failed = await events_of(server, input="Hello")
    assert (error["type"], error["message"]) == ("error", "the worker is gone")
    response = failed["response"]
    assert (response["status"], response["error"]["message"]) == ("failed", error["message"])
    (item,) = put_together(begun)
    assert response["output"] == [{**item, "status": "incomplete"}]
    assert item["content"][0]["text"]
    response = await server.post(PATH, input="Hello")
    assert response.status_code == 503


@pytest.mark.parametrize(("strict", "status"), [(None, 200), (False, 200), (True, 422)])
async def test_a_schema_of_which_something_cannot_be_kept_is_refused_where_it_is_strict(
    strict: bool | None, status: int
) -> None:
    server = server_that_says("[]", defaults=EOS)
    form = {"type": "json_schema", "name": "a", "schema": {"uniqueItems": True}, "strict": strict}
    response = await server.post(PATH, input="x", text={"format": form})
    assert response.status_code == status, response.text


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    model = replace(model_that_thinks(), defaults=EOS)
    with live_server(model) as server:
        yield server
    model.grammar_trial.close()


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_the_official_client_reads_what_we_say(live: LiveServer, client: openai.OpenAI) -> None:
    live.backend.script = say(THOUGHTS_AND_CALLS)
    with client.responses.stream(model="small", input="Hello", tools=TOOLS) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert "".join(texts) == response.output_text == "I look."
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("look", LOOK), ("buy", BUY)]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        for call in calls
    ]
    sent: Any = [{"role": "user", "content": "Hello"}, *response.output, *results]
    live.backend.script = say("All done.")
    again = client.responses.create(model="small", input=sent, tools=TOOLS)
    assert again.output_text == "All done."


class Point(BaseModel):
    x: int


def test_the_official_client_parses_what_fits_its_type(
    live: LiveServer, client: openai.OpenAI
) -> None:
    live.backend.script = say('{"x": 3}')
    parsed = client.responses.parse(model="small", input="Hello", text_format=Point)
    assert parsed.output_parsed == Point(x=3)
    assert live.backend.last.params.grammar is not None


def test_the_official_client_raises_what_ends_a_stream(
    live: LiveServer, client: openai.OpenAI
) -> None:
    live.backend.script = breaks_off(UnavailableError("the worker is gone"))
    with (
        pytest.raises(openai.APIError, match="the worker is gone"),
        client.responses.create(model="small", input="Hello", stream=True) as stream,
    ):
        for _ in stream:
            pass
