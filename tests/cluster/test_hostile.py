"""Bytes, headers and paths that no honest client sends: a 4xx in OpenAI's shape, short, with
nothing of ours in it, and the next request works."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.api_keys import VARIABLE, ApiKeys
from cluster.openai.body import Body, parse
from cluster.openai.chat_request import ChatRequest
from cluster.openai.completion_request import CompletionRequest
from cluster.openai.crowd import check_crowd
from cluster.openai.errors import ApiError
from cluster.openai.request_limits import MAX_CONTAINERS, MAX_NAMES, MAX_VALUES
from cluster.openai.responses.request import ResponsesRequest
from cluster.openai.token_requests import DetokenizeRequest, TokenizeRequest
from engine.errors import RequestError
from tests.cluster.conftest import Server, check_left, lasting
from tests.cluster.test_bad_input import error_of

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/embeddings")
GOOD: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Grüße"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
        ],
        "instructions": "Be brief.",
        "max_output_tokens": 4,
        "text": {"format": {"type": "text"}},
    },
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4, "logit_bias": {"1": 1.5}, "stop": "x"},
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Grüße"}]},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ],
        "max_tokens": 4,
        "metadata": {"a": "b"},
    },
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/embeddings": {"input": "x"},
}
# Of the program's inside, in any answer.
LEAK = re.compile(
    r'Traceback|File "|\.py\b|<[\w.]+ object at|0x[0-9a-f]{6,}|pydantic|site-packages'
)


KEYS = ApiKeys.load(None, {VARIABLE: "sk-0123456789"})


def check(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, (response.status_code, response.text[:500])
        error_of(response)
        assert len(response.content) < 10_000
    assert not LEAK.search(response.text)


async def still_works(server: Server) -> None:
    answer = await server.ok("/v1/completions", prompt="x", max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2
    check_left(server)


def send(path: str, data: bytes, headers: dict[bytes, bytes] | None = None) -> None:
    async def go() -> None:
        server = lasting()
        check(await server.client.post(path, content=data, headers=headers or {}))
        await still_works(server)

    asyncio.run(go())


@st.composite
def broken(draw: st.DrawFn, good: bytes) -> bytes:
    """Some of it is cut out, repeated, replaced or put elsewhere."""
    junk = st.one_of(
        st.binary(max_size=8),
        st.sampled_from(
            [b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\0", b"NaN", b"-Infinity", b"1e999"]
        ),
        st.sampled_from([b"[" * 300, b'{"a":' * 300, b"9" * 400, b"-", b"null", b'"', b"\\"]),
    )
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(good)))
        end = draw(st.integers(start, min(len(good), start + 20)))
        good = good[:start] + draw(junk) + good[end:]
    return good


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=80)
@given(data=st.data())
def test_bodies_with_broken_bytes(path: str, data: st.DataObject) -> None:
    send(path, data.draw(broken(json.dumps(GOOD[path]).encode())))


@pytest.mark.parametrize("depth", [50, 190, 250, 5000, 100_000])
@pytest.mark.parametrize("text", ["[", '{"a":'])
def test_depth_in_any_place(depth: int, text: str) -> None:
    close = {"[": "]", '{"a":': "}"}[text]
    nested = text * depth + "1" + close * depth
    kinds: dict[str, type[Body]] = {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatRequest,
        "/v1/responses": ResponsesRequest,
        "/tokenize": TokenizeRequest,
    }
    for path, kind in kinds.items():
        good = json.dumps(GOOD[path])[1:-1]
        for field in kind.model_fields if depth == 190 else ("metadata", "tools", "messages"):
            send(path, f'{{{good}, "{field}": {nested}}}'.encode())
    call = {"function": {"name": "f", "arguments": nested}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    send("/v1/chat/completions", json.dumps({"messages": chat}).encode())


MANY = 1000
CROWDS = [
    [1] * MANY,
    [""] * MANY,
    [{}] * MANY,
    [{"role": 1, "x": 1}] * MANY,
    {f"x{number}": 1 for number in range(MANY)},
    [{f"x{number}": 1 for number in range(MANY)}],
]


@pytest.mark.parametrize(
    "kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
)
def test_no_body_has_errors_without_number(kind: type[Body]) -> None:
    """They are collected before one is told, in memory and while nothing else runs: seconds, of a
    body of some megabytes."""
    places: list[Any] = [{name: crowd} for name in kind.model_fields for crowd in CROWDS]
    for crowd in CROWDS:
        call = {"function": crowd}
        places += [
            {"messages": [{"role": "user", "tool_calls": crowd}]},
            {"messages": [{"role": "user", "tool_calls": [call]}]},
            {"structured_outputs": {"choice": crowd}},
            {"response_format": {"type": "json_schema", "json_schema": crowd}},
        ]
    assert max(num_errors(kind, place) for place in places) <= 10


def num_errors(kind: type[Body], body: Any) -> int:
    try:
        kind.model_validate_json(json.dumps(body))
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(
    "kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
)
@pytest.mark.parametrize("crowd", ["[[]%s]", "[{}%s]", '{"a":0%s}'])
def test_bodies_of_too_many_values_are_not_read(kind: type[Body], crowd: str) -> None:
    """No other thread runs while they are."""
    item = {"[[]%s]": ",[]", "[{}%s]": ",{}", '{"a":0%s}': ',"a":0'}[crowd]
    text = crowd % (item * max(MAX_CONTAINERS, MAX_NAMES))
    call = {"function": {"name": "f", "arguments": text}}
    bodies = [
        f'{{"prompt": "\\\\", "x": {text}}}',
        json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}),
    ]
    for body in bodies if kind is ChatRequest else bodies[:1]:
        with pytest.raises(ApiError, match="arrays and objects") as caught:
            parse(kind, body.encode())
        assert caught.value.status == 413


@pytest.mark.parametrize("num_messages", [1, 4])
def test_arguments_of_calls_are_not_read_where_all_of_them_have_too_many_values(
    num_messages: int,
) -> None:
    """Each alone would be: they are objects in memory at once."""
    most = json.dumps({"a": [[]] * (MAX_CONTAINERS // 4 - 2)})

    def body(*arguments: str) -> bytes:
        calls = [{"function": {"name": "f", "arguments": text}} for text in arguments]
        size = len(calls) // num_messages
        said = [calls[start : start + size] for start in range(0, len(calls), size)]
        messages = [{"role": "assistant", "tool_calls": some} for some in said]
        return json.dumps({"messages": messages}).encode()

    broken = '{"a": "'  # hides nothing of what comes behind it
    assert parse(ChatRequest, body(broken, most, most, most)).messages
    with pytest.raises(ApiError, match="messages: their texts of JSON together") as caught:
        parse(ChatRequest, body(broken, broken, broken, most, most, most, most, most))
    assert caught.value.status == 413


@pytest.mark.parametrize("value", ["1", '""'])
def test_a_body_has_so_many_values_and_no_more(value: str) -> None:
    most = b'{"tokens":[%s]}' % b",".join([value.encode()] * MAX_VALUES)
    check_crowd(most)
    with pytest.raises(ApiError, match="and 4000000 values") as caught:
        check_crowd(most[:-2] + b",0]}")
    assert caught.value.status == 413


@pytest.mark.parametrize("text", ['[{":', ",,,,", '\\"[', "\\\\[", '"'])
def test_what_stands_in_texts_is_no_crowd(text: str) -> None:
    long = text * (MAX_NAMES + 1)
    body = parse(CompletionRequest, json.dumps({"prompt": [long, long]}).encode())
    assert body.prompt == [long, long]


def test_a_schema_as_an_endless_text_is_not_read() -> None:
    body = parse(
        CompletionRequest, json.dumps({"prompt": "x", "guided_json": "[" * 2**21}).encode()
    )
    with pytest.raises(RequestError, match=r"guided_json: .* at most 1048576 characters"):
        body.named_grammar  # noqa: B018


@pytest.mark.parametrize("name", ["temperature", "seed", "n", "max_tokens", "logit_bias", "prompt"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 4000])
def test_numbers_that_are_none(name: str, number: str) -> None:
    async def go() -> None:
        server = lasting()
        data = f'{{"prompt": "x", "{name}": {number}}}'.encode()
        response = await server.client.post("/v1/completions", content=data)
        assert response.status_code == 400, response.text[:200]
        check(response)
        await still_works(server)

    asyncio.run(go())


names = st.sampled_from(
    ["authorization", "content-length", "content-type", "x-request-id", "x-request-timeout"]
    + ["content-encoding", "transfer-encoding", "expect", "host", "accept", "cookie", "range"]
)
header_values = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"nan", b"inf", b"-1", b"0", b"1e-9", b"1_0", b"\xb2", b"9" * 5000, b"a" * 70_000]
    )
    | st.sampled_from([b"Bearer", b"Bearer \xff\xfe", b"Basic x", b"gzip", b"a\r\nX-Evil: 1", b""]),
)


@settings(max_examples=120)
@given(headers=st.dictionaries(names, header_values, max_size=4), path=st.sampled_from(PATHS))
def test_headers_of_any_bytes(headers: dict[str, bytes], path: str) -> None:
    """Straight to the application: what a server in front of it would refuse comes too."""
    encoded = {name.encode(): value for name, value in headers.items()}
    request_id = headers.get("x-request-id")

    async def go() -> None:
        for keys in (None, KEYS):
            server = lasting(keys)
            response = await call(server, path, encoded)
            check(response)
            if keys is not None:
                assert response.status_code == 401
            if response.status_code == 200 and "completions" in path:
                timeout = headers.get("x-request-timeout", b"1")
                assert re.fullmatch(rb"[\x21-\x7e]{1,128}", request_id or b"x")
                assert float(timeout.decode("latin-1")) > 0
            assert "x-evil" not in response.headers
            check_left(server)

    asyncio.run(go())


async def call(server: Server, path: str, headers: dict[bytes, bytes]) -> httpx.Response:
    """As ASGI has it; httpx would put its own headers beside these."""
    body, sent = json.dumps(GOOD[path]).encode(), asyncio.Event()
    status, received, out = 0, [], b""

    async def receive() -> dict[str, Any]:
        if sent.is_set():
            await asyncio.Event().wait()
        sent.set()
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        nonlocal status, received, out
        if message["type"] == "http.response.start":
            status, received = message["status"], message["headers"]
        else:
            out += message["body"]

    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode()},
        **{"query_string": b"", "root_path": "", "headers": list(headers.items())},
    }
    await server.app(scope, receive, send)
    return httpx.Response(status, headers=received, content=out)


@settings(max_examples=80)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"]),
    path=st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=20),
        st.sampled_from(["v1/models/" + "x" * 5000, "v1/models/a/../b", "v1/models/", "%00", "//"]),
        st.sampled_from(
            [path[1:] + end for path in PATHS for end in ("/", "%20", "?a=b", "#", ";")]
        ),
    ),
)
def test_paths_and_methods(method: str, path: str) -> None:
    async def go() -> None:
        server = lasting()
        try:
            request = server.client.build_request(method, "/" + path, content=b"{")
        except httpx.InvalidURL:
            return
        response = await server.client.send(request)
        if response.status_code != 200:
            assert response.status_code in (400, 404, 405)
        check(response)

    asyncio.run(go())


async def test_what_is_quoted_is_short(server: Server) -> None:
    long = "x" * 100_000
    for path, body in (
        ("/v1/completions", {"prompt": "x", "model": long}),
        ("/v1/completions", {"prompt": "x", long: 1}),
        ("/v1/completions", {"prompt": "x", "stream_options": {long: 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "bad", "content": long}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", long: "x"}]}),
    ):
        response = await server.post(path, **body)
        assert response.status_code in (400, 404, 422)
        error_of(response)
        assert len(response.content) < 2000
