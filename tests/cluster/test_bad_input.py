"""Whatever a client sends: never a 5xx, never silence, and errors in OpenAI's shape."""

import asyncio
import gzip
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsBase as ChatCreateParamsBase,
)
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from cluster.http_exchange import HttpLimits
from cluster.openai.body import Body
from cluster.openai.chat_request import ChatRequest
from cluster.openai.completion_request import CompletionRequest
from cluster.openai.request_limits import RequestLimits
from cluster.openai.responses.request import ResponsesRequest
from cluster.openai.token_requests import TokenizeRequest
from engine.errors import EngineError, RequestError, UnavailableError
from engine.text.chat_template import ChatTemplate
from engine.text.special_tokens import SpecialTokens
from tests.cluster.conftest import Server, make_server
from tests.cluster.fakes import MAX_MODEL_LEN, FakeBackend, say

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
TEXT = {"type": "text", "text": "Hello"}
NOT_IDS = "logit_bias: must be an object whose names are token ids"


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


async def refused(server: Server, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await server.client.post(path, content=data)
    assert response.status_code == status, response.text
    return error_of(response)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"prompt": "\\ud800", "messages": []}',
        b'{"prompt": "a\x00b"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x"} trailing',
    ],
)
async def test_bodies_that_are_no_json_object(server: Server, path: str, body: bytes) -> None:
    await refused(server, path, body)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt", None),
        ("prompt", 1),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", 1]),
        ("prompt", [1, "a"]),
        ("prompt", [1, True]),
        ("prompt", [1.5]),
        ("prompt", [-1]),
        ("prompt", [10**9]),
        ("prompt", [10**30]),
        ("prompt", {"a": 1}),
        ("prompt", ""),
        ("prompt", ["x"] * 1025),
        ("prompt", "word " * MAX_MODEL_LEN * 50),
        ("prompt", [1] * MAX_MODEL_LEN),
        ("max_tokens", "16"),
        ("max_tokens", 1.5),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", MAX_MODEL_LEN),
        ("max_tokens", 10**30),
        ("n", 0),
        ("n", 129),
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", 1e999),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**9]),
        ("seed", 2**63),
        ("seed", 1.5),
        ("min_tokens", 17),
        ("stop", 1),
        ("stop", [""]),
        ("stop", ["a"] * 33),
        ("stop", "x" * 1025),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["</s>"]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("priority", 2**40),
        ("cache_salt", ""),
        ("cache_salt", "a/b"),
        ("cache_salt", "x" * 129),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("echo", 1),
        ("user", 5),
        ("skip_special_tokens", 1),
    ],
)
async def test_wrong_values_name_their_parameter(server: Server, param: str, value: Any) -> None:
    error = await refused(server, COMPLETIONS, {"prompt": "x", param: value})
    assert error["type"] == "invalid_request_error"
    assert error["param"].split("[")[0].split(".")[0] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages", [1]),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": 1, "content": "x"}]),
        ("messages", [{"role": "user", "content": 1}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "user", "content": "x", "colour": "red"}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]),
        ("messages", [{"role": "user", "content": "x " * MAX_MODEL_LEN}]),
        ("top_logprobs", 3),
        ("logprobs", 3),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", "any"),
        ("documents", [{"title": 1}]),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {"add_generation_prompt": False}),
        ("max_tokens", 0),
        ("max_tokens", MAX_MODEL_LEN),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", MAX_MODEL_LEN),
    ],
)
async def test_wrong_values_of_chat_name_their_parameter(
    server: Server, param: str, value: Any
) -> None:
    error = await refused(server, CHAT, {"messages": HELLO, param: value})
    assert error["param"].split("[")[0] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: must have at least 1 element"),
        ({"messages": HELLO * 4097}, "messages: must have at most 4096 elements"),
        ({"cache_salt": "x" * 129}, "cache_salt: must have at most 128 characters"),
        ({"messages": [{"role": "user", "audio": 1}]}, "messages[0].audio: must be null, not 1"),
        ({"max_tokens": "4"}, "max_tokens: must be a whole number, not a string"),
        ({"seed": 1.5}, "seed: must be a whole number, not 1.5"),
        ({"temperature": True}, "temperature: must be a number, not true"),
        ({"top_p": float("inf")}, "top_p: must be a finite number, not inf"),
        ({"stream": "yes"}, "stream: must be true or false, not a string"),
        ({"user": [1]}, "user: must be a string, not an array"),
        ({"stop_token_ids": {}}, "stop_token_ids: must be an array, not an object"),
        (
            {"allowed_token_ids": [1, "a"]},
            "allowed_token_ids[1]: must be a whole number, not a string",
        ),
        ({"metadata": [1]}, "metadata: must be an object, not an array"),
        ({"messages": [*HELLO, {"role": None}]}, "messages[1].role: must be a string, not null"),
        ({"priority": 2**31}, "priority: must be below 2147483648, not 2147483648"),
        ({"top_logprobs": -1}, "top_logprobs: must be at least 0, not -1"),
        ({"top_logprobs": 21}, "top_logprobs: must be at most 20, not 21"),
        ({"messages": None}, "messages is required"),
        ({"metadata": nested(200)}, "the body is nested more than 200 deep"),
        ({"logit_bias": {"46": "x"}}, "logit_bias[46]: must be a number, not a string"),
        ({"logit_bias": {" 46": 1}}, f"{NOT_IDS}, as ' 46' is not"),
        ({"logit_bias": {"1": 1, "47.0": 1}}, f"{NOT_IDS}, as '47.0' is not"),
        ({"logit_bias": {"046": 1}}, f"{NOT_IDS}, as '046' is not"),
        ({"store": 0}, "store is not supported"),
        (
            {"messages": [{"role": "user", "content": [{**TEXT, "citations": {}}]}]},
            "messages[0].content: must be text parts of type and text alone;"
            " number 0 has 'citations'",
        ),
        (
            {"messages": [{"role": "assistant", "annotations": [1]}]},
            "messages[0].annotations: must be empty",
        ),
    ],
)
async def test_rules_are_told_in_words(
    server: Server, fields: dict[str, Any], message: str
) -> None:
    error = await refused(server, CHAT, {"messages": HELLO, **fields})
    assert error["message"] == message
    if ": must" in message:
        assert error["param"] == message.split(":")[0]
        assert error["code"] == "invalid_value"


@pytest.mark.parametrize(
    ("path", "params"),
    [
        (COMPLETIONS, ["best_of", "suffix", "use_beam_search", "bad_words", "vllm_xargs"]),
        (COMPLETIONS, ["guided_whitespace_pattern", "truncate_prompt_tokens"]),
        (CHAT, ["guided_decoding_backend", "functions", "modalities", "echo"]),
        (CHAT, ["chat_template", "web_search_options", "audio", "prediction", "service_tier"]),
    ],
)
async def test_parameters_that_we_lack_are_refused_by_name(
    server: Server, path: str, params: list[str]
) -> None:
    good = {"prompt": "x", "messages": HELLO}
    body = {key: good[key] for key in (["prompt"] if path == COMPLETIONS else ["messages"])}
    for param in params:
        error = await refused(server, path, {**body, param: "anything"})
        assert error["param"] == param
        assert error["code"] == "unsupported_parameter"
        assert "not supported" in error["message"]
        await server.ok(path, **{**body, param: None})


def words(text: str) -> list[str]:
    return text.split()


COMMON = words("""
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options temperature top_p user top_k min_p repetition_penalty length_penalty
    use_beam_search stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    allowed_token_ids prompt_logprobs logprob_token_ids bad_words add_special_tokens
    response_format structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
    repetition_detection thinking_token_budget stream_interval echo best_of service_tier store
    metadata safety_identifier prompt_cache_key guided_json guided_regex guided_choice
    guided_grammar logits_processors data_parallel_rank
""")
OF_COMPLETIONS = words("""
    prompt suffix prompt_embeds
""")
OF_CHAT = words("""
    messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls
    reasoning_effort include_reasoning add_generation_prompt continue_final_message documents
    chat_template chat_template_kwargs mm_processor_kwargs functions function_call modalities
    audio prediction verbosity web_search_options
""")


@pytest.mark.parametrize(
    ("kind", "names", "of_client"),
    [
        (CompletionRequest, COMMON + OF_COMPLETIONS, CompletionCreateParamsBase),
        (ChatRequest, COMMON + OF_CHAT, ChatCreateParamsBase),
        (ResponsesRequest, [], ResponseCreateParamsBase),
    ],
)
def test_every_parameter_that_clients_know_is_taken_or_refused_as_such(
    kind: type[CompletionRequest | ChatRequest | ResponsesRequest],
    names: list[str],
    of_client: type,
) -> None:
    """OpenAI's, by the official client, and vLLM's: none of them is "unknown"."""
    for name in {*names, *of_client.__annotations__}:
        assert (name in kind.model_fields) != (name in kind.not_supported), name


async def test_values_that_ask_for_nothing_are_taken(server: Server) -> None:
    await server.ok(COMPLETIONS, prompt="x", best_of=1, suffix="", use_beam_search=False)
    plain = {"type": "text"}
    await server.ok(CHAT, messages=HELLO, verbosity="medium", service_tier="auto")
    await server.ok(CHAT, messages=HELLO, response_format=plain, parallel_tool_calls=True)
    await server.ok(COMPLETIONS, prompt="x", n=3, best_of=3)
    assert (await refused(server, COMPLETIONS, {"prompt": "x", "best_of": 3}))["param"] == "best_of"
    options = {"include_usage": True, "include_obfuscation": False}
    assert (await server.events(COMPLETIONS, prompt="x", stream_options=options))[-1]["usage"]
    options["include_obfuscation"] = True
    body = {"prompt": "x", "stream": True, "stream_options": options}
    error = await refused(server, COMPLETIONS, body)
    assert error["param"] == "stream_options.include_obfuscation"
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        (COMPLETIONS, CompletionRequest, {"prompt": "x"}),
        (CHAT, ChatRequest, {"messages": HELLO}),
        (RESPONSES, ResponsesRequest, {"input": "x"}),
        ("/tokenize", TokenizeRequest, {"prompt": "x"}),
    ],
)
async def test_null_is_not_said(
    server: Server, path: str, kind: type[Body], body: dict[str, Any]
) -> None:
    nulls = {name: None for name in kind.model_fields if name not in body}
    await server.ok(path, **body)
    await server.ok(path, **nulls, **body)
    if server.backend.streams:
        plain, with_nulls = (stream.request for stream in server.backend.streams)
        assert replace(plain.params, seed=1) == replace(with_nulls.params, seed=1)


async def test_what_is_for_messages_does_not_go_with_a_prompt(server: Server) -> None:
    for name, value in (
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("chat_template_kwargs", {"x": 1}),
        ("add_generation_prompt", True),
        ("continue_final_message", True),
    ):
        assert (await refused(server, "/tokenize", {"prompt": "x", name: value}))["param"] == name
    nothing: dict[str, Any] = {
        "tools": [],
        "chat_template_kwargs": {},
        "add_generation_prompt": False,
    }
    await server.ok("/tokenize", prompt="x", **nothing)


async def test_unknown_parameters_are_refused_by_name(server: Server) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "x", "temprature": 1}),
        (CHAT, {"messages": HELLO, "temprature": None}),
        ("/tokenize", {"prompt": "x", "temprature": 1}),
        ("/detokenize", {"tokens": [], "temprature": 1}),
    ):
        error = await refused(server, path, body)
        assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    body = {"prompt": "x", "stream": True, "stream_options": {"usage": True}}
    assert (await refused(server, COMPLETIONS, body))["param"] == "stream_options.usage"


async def test_other_models_are_not_found(server: Server) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "x"}),
        (CHAT, {"messages": HELLO}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        error = await refused(server, path, {**body, "model": "gpt-4"}, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert (await server.client.get("/v1/models/gpt-4")).status_code == 404


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_what_is_no_text_within_the_arguments_of_a_call_is_the_messages(
    server: Server, path: str
) -> None:
    """They are JSON in JSON, which templates print."""
    source = "{{ messages[-1].tool_calls[0].function.arguments.a }}"
    template = ChatTemplate({"default": source}, SpecialTokens({}, (), ()), "tests")
    server = make_server(model=replace(server.model, chat_template=template))
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    chat = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    error = await refused(server, path, {"messages": chat})
    assert error["param"] == "messages"
    assert error["message"].startswith("messages: must be Unicode text")


async def test_choices_of_all_prompts_together_are_bounded(server: Server) -> None:
    error = await refused(server, COMPLETIONS, {"prompt": ["x"] * 33, "n": 128})
    assert error["param"] == "n"
    assert server.backend.streams == []


async def test_operators_may_ask_for_tighter_bounds() -> None:
    server = make_server(request_limits=RequestLimits(20, 2, 3, -1))
    body: dict[str, Any] = {"prompt": [[1] * 20] * 3, "n": 2, "priority": -1}
    await server.ok(COMPLETIONS, **body)
    for path, field, value, said in (
        (COMPLETIONS, "prompt", [1] * 21, "prompt: 21 tokens, and this server takes 20"),
        (COMPLETIONS, "prompt", "word " * 21, "and this server takes 20"),
        (COMPLETIONS, "prompt", ["x"] * 4, "prompt: more than 3 prompts"),
        (COMPLETIONS, "n", 3, "n: 3, must be at most 2"),
        (CHAT, "n", 3, "n: 3, must be at most 2"),
        (COMPLETIONS, "priority", -2, "priority: -2, must be at least -1"),
        (CHAT, "priority", -(2**31), "must be at least -1"),
        (CHAT, "messages", [{"role": "user", "content": "word " * 21}], "this server takes 20"),
    ):
        good = {"prompt": "x"} if path == COMPLETIONS else {"messages": HELLO}
        error = await refused(server, path, {**good, field: value})
        assert error["param"] == field
        assert said in error["message"]


async def test_context_that_does_not_fit_has_openais_code(server: Server) -> None:
    error = await refused(server, COMPLETIONS, {"prompt": [1] * (MAX_MODEL_LEN + 1)})
    assert error["code"] == "context_length_exceeded"
    most = f"this model's maximum context length is {MAX_MODEL_LEN} tokens"  # clients look for it
    assert f"prompt is too long: {MAX_MODEL_LEN + 1} tokens, and {most}" in error["message"]
    error = await refused(server, COMPLETIONS, {"prompt": [1], "max_tokens": MAX_MODEL_LEN})
    assert error["code"] == "context_length_exceeded"
    assert most in error["message"]
    assert f"room for {MAX_MODEL_LEN - 1}" in error["message"]


async def test_text_that_could_never_fit_is_not_tokenised(server: Server) -> None:
    text = "x" * (server.model.tokenizer.max_token_chars * (MAX_MODEL_LEN + 1))
    for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        error = await refused(server, "/tokenize", body)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] in body


async def test_routes_that_are_not_there(server: Server) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/completions/", 404),
        ("DELETE", "/v1/models", 405),
    ):
        response = await server.client.request(method, path)
        assert response.status_code == status
        error_of(response)


async def test_embeddings_are_refused_by_name(server: Server) -> None:
    error = await refused(server, "/v1/embeddings", {"input": "x", "model": "small"})
    assert "embeddings are not supported" in error["message"]


async def test_a_byte_order_mark_before_a_body_is_passed_over(server: Server) -> None:
    body = json.dumps({"prompt": "x"}).encode("utf-8-sig")
    assert (await server.client.post(COMPLETIONS, content=body)).status_code == 200


async def test_compressed_bodies_are_refused_as_such(server: Server) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    for path in (COMPLETIONS, "/tokenize"):
        headers = {"content-encoding": "gzip"}
        packed = gzip.compress(body)
        response = await server.client.post(path, content=packed, headers=headers)
        assert response.status_code == 415
        assert "Content-Encoding" in error_of(response)["message"]
        headers = {"content-encoding": "Identity"}
        assert (await server.client.post(path, content=body, headers=headers)).status_code == 200


async def test_large_bodies_are_cut_off_early() -> None:
    server = make_server(limits=HttpLimits(max_body_bytes=1000))
    data = json.dumps({"prompt": "x" * 2000}).encode()
    await refused(server, COMPLETIONS, data, 413)
    num_sent = 0

    async def pieces() -> Any:
        nonlocal num_sent
        for _ in range(100):
            num_sent += 1
            yield b"x" * 100

    response = await server.client.post(COMPLETIONS, content=pieces())
    assert response.status_code == 413
    error_of(response)
    assert num_sent < 20


async def test_bodies_that_never_end_time_out() -> None:
    server = make_server(limits=HttpLimits(body_timeout_s=0.05))

    async def pieces() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    response = await server.client.post(COMPLETIONS, content=pieces())
    assert response.status_code == 408
    error_of(response)


@pytest.mark.parametrize("value", ["a b", "x" * 129, "", "ü"])
async def test_request_ids_that_are_no_ids(server: Server, value: str) -> None:
    headers = {b"X-Request-Id": value.encode("latin-1")}
    response = await server.client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
    assert response.status_code == 400
    assert error_of(response)["param"] == "X-Request-Id"
    assert response.headers["x-request-id"] == value


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("prompt", "too long"), 400),
        (UnavailableError("stopping", "at 10.0.0.7:500"), 503),
        (EngineError("the step failed"), 500),
    ],
)
async def test_the_engines_errors_have_their_status(
    error: EngineError, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(lambda request: iter([error]))
    for stream in (False, True):
        response = await server.post(COMPLETIONS, prompt="x", stream=stream)
        assert response.status_code == status
        assert str(error) in error_of(response)["message"]
        assert "10.0.0.7" not in response.text, "an address is no client's business"
        assert ("retry-after" in response.headers) == (status == 503)
    assert caplog.text.count(str(error)) == (2 if status == 500 else 0), (
        "an operator's, not a user's"
    )
    assert all(stream.num_closed for stream in server.backend.streams)


async def test_an_error_in_mid_stream_is_an_event() -> None:
    def script(request: Any) -> Any:
        steps = say()(request)
        yield next(steps)
        yield next(steps)
        yield EngineError("the step failed")

    server = make_server(script)
    response = await server.post(COMPLETIONS, prompt="x", stream=True)
    assert response.status_code == 200
    frames = response.text.removesuffix("\n\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    error = json.loads(frames[-2].removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == ("the step failed", "server_error")
    assert len(frames) == 4
    assert (await server.post(COMPLETIONS, prompt="x")).status_code == 500


async def test_an_engine_that_falls_silent_is_no_answer() -> None:
    server = make_server(lambda request: iter(list(say()(request))[:3]))
    response = await server.post(COMPLETIONS, prompt="x", max_tokens=200)
    assert response.status_code == 500
    error_of(response)


async def test_our_own_bugs_are_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeBackend):
        def submit(self, request: Any) -> Any:
            raise KeyError("secret detail")

    server = make_server()
    server.front._backend = Broken()
    response = await server.post(COMPLETIONS, prompt="x")
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]
    assert "secret detail" in caplog.text
