"""Answers that fit a schema, a regex, choices or a grammar, as clients ask for them."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from cluster.http import build_app
from cluster.local_engine import LocalEngine, load_local_engine
from cluster.served_model import ServedModel
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.generation_defaults import GenerationDefaults
from engine.grammar.value import ANY_JSON_OBJECT, Grammar, GrammarKind, Reasoning
from engine.request import FinishReason, GenerationRequest, GenerationUpdate
from engine.text.chat_template import ChatTemplate
from engine.text.special_tokens import SpecialTokens
from tests.cluster.conftest import Server, make_server, read_events
from tests.cluster.fakes import Step, delta, prompt_report, say, small_model
from tests.cluster.live_server import live_server
from tests.engine.grammar.cases import BOMB, PERSON, choice, regex
from tests.engine.text.small_tokenizers import byte_level, wrapped

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SMALL: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
COMPACT = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SMALL, separators=(",", ":")))
NUMBERS = "[0-9]+"
EOS = GenerationDefaults(eos_token_ids=(2,))


@pytest.fixture(scope="module")
def model() -> Iterator[ServedModel]:
    """With one process that tries all grammars."""
    model = small_model(EOS)
    yield model
    model.grammar_trial.close()


@pytest.fixture
async def constrained(model: ServedModel) -> AsyncIterator[Server]:
    server = make_server(model=model)
    async with server.client:
        yield server


def json_schema(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value, **more}}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_JSON_OBJECT),
        ({"response_format": json_schema(SMALL, strict=True)}, COMPACT),
        ({"response_format": json_schema(SMALL, description="d", strict=False)}, COMPACT),
        ({"response_format": json_schema({**SMALL, "not": {}}, strict=False)}, COMPACT),
        ({"guided_json": SMALL}, COMPACT),
        ({"guided_json": json.dumps(SMALL, indent=2)}, COMPACT),
        ({"guided_regex": NUMBERS}, regex(NUMBERS)),
        ({"guided_choice": ["a", "ü"]}, choice("a", "ü")),
        ({"guided_grammar": 'root ::= "a"'}, Grammar(GrammarKind.GRAMMAR, 'root ::= "a"')),
        ({"structured_outputs": {"json": SMALL}}, COMPACT),
        ({"structured_outputs": {"regex": NUMBERS}}, regex(NUMBERS)),
        ({"structured_outputs": {"choice": ["a", "ü"]}}, choice("a", "ü")),
        ({"structured_outputs": {"json_object": True}}, ANY_JSON_OBJECT),
        ({"structured_outputs": {"regex": NUMBERS, "json_object": False}}, regex(NUMBERS)),
        (
            {
                "structured_outputs": {"regex": NUMBERS},
                "guided_regex": NUMBERS,
                "guided_decoding_backend": "guidance",
            },
            regex(NUMBERS),
        ),
    ],
)
async def test_ways_to_ask(
    constrained: Server, body: dict[str, Any], grammar: Grammar | None
) -> None:
    await constrained.ok(COMPLETIONS, prompt="x", **body)
    assert constrained.backend.last.params.grammar == grammar
    await constrained.ok(CHAT, messages=[{"role": "user", "content": "x"}], **body)
    assert constrained.backend.last.params.grammar == grammar


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "text", "json_schema": {"name": "x"}}}),
        ("response_format.json_schema.schema", {"response_format": json_schema([1])}),
        ("guided_json", {"guided_json": "{"}),
        ("guided_json", {"guided_json": "[]"}),
        ("guided_json", {"guided_json": {"enum": ["x" * 70_000]}}),
        (
            "response_format.json_schema.schema",
            {"response_format": json_schema({"not": {"enum": ["x" * 70_000]}})},
        ),
        ("guided_regex", {"guided_regex": ""}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "x"}}),
        ("guided_regex", {"guided_json": SMALL, "guided_regex": "a"}),
        ("guided_regex", {"structured_outputs": {"regex": "b"}, "guided_regex": "a"}),
        ("guided_json", {"response_format": {"type": "json_object"}, "guided_json": SMALL}),
        ("ignore_eos", {"guided_regex": "a", "ignore_eos": True}),
        ("guided_choice", {"guided_choice": []}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": ["a", ""]}}),
        ("guided_json", {"guided_json": True}),
        ("structured_outputs.json", {"structured_outputs": {"json": [1]}}),
    ],
)
async def test_what_is_wrong_is_a_400_that_names_it(
    constrained: Server, param: str, body: dict[str, Any]
) -> None:
    await refuse(constrained, 400, param, body)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("response_format.json_schema.schema", {"response_format": json_schema({"type": 5})}),
        (
            "response_format.json_schema.schema",
            {"response_format": json_schema({**SMALL, "not": {}}, strict=True)},
        ),
        ("guided_json", {"guided_json": {"type": "array", "uniqueItems": True}}),
        ("guided_regex", {"guided_regex": "("}),
        ("guided_grammar", {"guided_grammar": "nonsense"}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "("}}),
    ],
)
async def test_what_cannot_be_compiled_is_a_422_that_names_it(
    constrained: Server, param: str, body: dict[str, Any]
) -> None:
    await refuse(constrained, 422, param, body)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_grows_too_large_later_is_named_too(
    constrained: Server, stream: bool
) -> None:
    def fail(request: GenerationRequest) -> Iterator[Step]:
        yield RequestError("grammar", "lexer error: too many expressions")

    constrained.backend.script = fail
    body = {"prompt": "x", "structured_outputs": {"regex": "a"}, "stream": stream}
    error = (await constrained.post(COMPLETIONS, **body)).json()["error"]
    field = "structured_outputs.regex"
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert error["message"] == f"{field}: lexer error: too many expressions"


async def refuse(server: Server, status: int, param: str, body: dict[str, Any]) -> None:
    for extra in ({}, {"stream": True}):
        response = await server.post(COMPLETIONS, prompt="x", **body, **extra)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), error
        assert param in error["message"]
    assert not server.backend.streams


async def test_a_bomb_is_a_422_and_holds_up_nobody_else(
    constrained: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await constrained.ok(COMPLETIONS, prompt="x", guided_regex="a")
    monkeypatch.setattr(constrained.model.grammar_trial, "_compile_s", 1.0)
    response = await constrained.post(COMPLETIONS, prompt="x", response_format=json_schema(BOMB))
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "response_format.json_schema.schema"
    await constrained.ok(COMPLETIONS, prompt="x", guided_regex="a+")


@pytest.fixture(scope="module")
def local() -> LocalEngine:
    return load_local_engine(
        EngineConfig(
            dtype="float32", max_model_len=512, kv_cache_memory_bytes=16 << 20, num_threads=1
        )
    )


@pytest.fixture
async def client(local: LocalEngine) -> AsyncIterator[httpx.AsyncClient]:
    model = await local.start()
    app, _ = build_app(local.backend, model)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    await local.stop()
    model.grammar_trial.close()


@pytest.fixture(scope="module", autouse=True)
def _no_child_is_left(local: LocalEngine) -> Iterator[None]:
    yield
    assert local.model.grammar_trial._child is None


async def test_from_end_to_end(client: httpx.AsyncClient) -> None:
    """One engine and one client for all of it: an engine is started once."""
    await check_chat(client)
    await check_stream(client)
    await check_choices(client)


async def check_chat(client: httpx.AsyncClient) -> None:
    asked = {
        "messages": [{"role": "user", "content": "Who?"}],
        "response_format": json_schema(PERSON, strict=True),
        "temperature": 1,
        "top_p": 1,
        "n": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 150,
    }
    answer = (await client.post(CHAT, json=asked)).json()
    ends = {choice["finish_reason"] for choice in answer["choices"]}
    assert "stop" in ends <= {"stop", "length"}
    for one in answer["choices"]:
        assert one["logprobs"]["content"]
        if one["finish_reason"] == "stop":
            jsonschema.validate(json.loads(one["message"]["content"]), PERSON)


async def check_stream(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "x", "guided_regex": r"\d{4}-\d\d", "seed": 3, "temperature": 1}
    whole = (await client.post(COMPLETIONS, json=asked)).json()["choices"][0]["text"]
    events = read_events((await client.post(COMPLETIONS, json={**asked, "stream": True})).text)
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert re.fullmatch(r"\d{4}-\d\d", whole)
    stopped = {**asked, "stop": "-"}
    choice = (await client.post(COMPLETIONS, json=stopped)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole[:4], "stop")


async def check_choices(client: httpx.AsyncClient) -> None:
    asked = {"prompt": ["x", "y"], "structured_outputs": {"choice": ["left", "right"]}, "n": 3}
    answer = (await client.post(COMPLETIONS, json=asked)).json()
    assert {choice["text"] for choice in answer["choices"]} <= {"left", "right"}
    plain = {**asked, "structured_outputs": {"json_object": True}, "max_tokens": 3}
    answer = (await client.post(COMPLETIONS, json=plain)).json()
    assert all(choice["text"].startswith("{") for choice in answer["choices"])


SOURCE = (
    "{% for one in messages %}{{ one.content }}{% endfor %}{{ tools }}"
    "{% if open %}<think>\n{% endif %}{% if closed %}<think></think>{% endif %}{# </think> #}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SMALL}}
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def thinking_model(*marks: str) -> ServedModel:
    """These are tokens of their own, and special ones."""
    backend = byte_level()
    backend.add_special_tokens(list(marks))
    template = ChatTemplate({"default": SOURCE}, SpecialTokens({}, (), ()), "tests")
    return replace(small_model(EOS), tokenizer=wrapped(backend), chat_template=template)


@pytest.mark.parametrize(
    ("marks", "how", "begins"),
    [
        (("<think>", "</think>"), {}, ("<think>", "</think>")),
        (("<think>", "</think>"), {"open": True}, (None, "</think>")),
        (("</think>",), {"open": True}, (None, "</think>")),
        (("<think>", "</think>"), {"closed": True}, None),
        (("</think>",), {}, None),
        ((), {}, None),
        ((), {"closed": True}, None),
    ],
)
@pytest.mark.parametrize(
    "asked",
    [
        {"guided_regex": "a"},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}, "tools": [WEATHER]},
    ],
)
async def test_an_answer_that_must_fit_may_begin_with_reasoning(
    marks: tuple[str, ...],
    how: dict[str, Any],
    begins: tuple[str | None, str] | None,
    asked: dict[str, Any],
) -> None:
    model = thinking_model(*marks)
    expected = None
    if begins is not None:
        start, end = begins
        end_id = model.tokenizer.token_id(end)
        assert end_id is not None
        start_id = None if start is None else model.tokenizer.token_id(start)
        expected = Reasoning(end_id, () if start_id is None else (start_id,))
    server = make_server(model=model)
    async with server.client:
        await server.ok(CHAT, **HI, **asked, chat_template_kwargs=how)
        assert server.backend.last.params.reasoning == expected
        begun = {"role": "assistant", "content": "Well"}
        continued = {"messages": [*HI["messages"], begun], "continue_final_message": True}
        await server.ok(CHAT, **{**continued, **asked})
        assert server.backend.last.params.reasoning is None, "in the middle of a message"
    model.grammar_trial.close()


async def test_reasoning_begins_with_all_that_its_mark_always_has_behind_it() -> None:
    model = replace(thinking_model("<|channel>", "<channel|>"), reasoning_parser="gemma4")
    server = make_server(model=model)
    async with server.client:
        await server.ok(CHAT, **HI, guided_regex="a")
        end = model.tokenizer.token_id("<channel|>")
        assert end is not None
        opening = model.tokenizer.encode("<|channel>thought", add_special_tokens=False)
        assert server.backend.last.params.reasoning == Reasoning(end, tuple(opening))
    model.grammar_trial.close()


async def test_reasoning_whose_end_is_no_token_does_not_go_with_a_grammar() -> None:
    model = thinking_model()
    server = make_server(model=model)
    async with server.client:
        asked = {**HI, "guided_regex": "a", "chat_template_kwargs": {"open": True}}
        response = await server.post(CHAT, **asked)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"] == "guided_regex"
        assert "</think>" in error["message"]
    model.grammar_trial.close()


@pytest.mark.parametrize(
    ("choice", "said", "call"),
    [
        ("required", '[{"name": "weather", "arguments": {"a": 1}}]', '{"a": 1}'),
        ({"type": "function", "function": {"name": "weather"}}, '{"a":1}', '{"a":1}'),
    ],
)
async def test_calls_that_must_be_are_read_behind_reasoning(
    choice: Any, said: str, call: str
) -> None:
    model = thinking_model("<think>", "</think>")
    tokenizer = model.tokenizer
    text = f"Hm.</think>\n\n{said}"
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id or 0]

    def script(request: GenerationRequest) -> Iterator[GenerationUpdate]:
        deltas = [delta(request, 0, token_ids, FinishReason.STOP)]
        yield GenerationUpdate(deltas, prompt_report(request))

    server = make_server(script, model)
    async with server.client:
        asked = {**HI, "tools": [WEATHER], "tool_choice": choice}
        answer = await server.ok(CHAT, **asked, chat_template_kwargs={"open": True})
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."
        assert [one["function"]["arguments"] for one in message["tool_calls"]] == [call]
        assert not message["content"]
    model.grammar_trial.close()


class Place(BaseModel):
    at: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, of its type
def test_official_client_sends_back_what_it_has_parsed(model: ServedModel) -> None:
    with (
        live_server(model) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="x") as client,
    ):
        live.backend.script = say('{"at": "here"}')
        hello: Any = [{"role": "user", "content": "Hello"}]
        answer = client.chat.completions.parse(
            model="small", messages=hello, response_format=Place, max_tokens=100
        )
        message: Any = answer.choices[0].message
        assert message.parsed == Place(at="here")
        client.chat.completions.create(model="small", messages=[*hello, message])
        text = model.tokenizer.decode(live.backend.last.prompt_token_ids)
        assert 'assistant\n{"at": "here"}<|im_end|>' in text
