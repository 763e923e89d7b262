"""/v1/chat/completions against an engine that says what it is told."""

from dataclasses import replace
from typing import Any

import pytest

from engine.generation_defaults import GenerationDefaults
from engine.text.chat_template import ChatTemplate
from engine.text.special_tokens import SpecialTokens
from tests.cluster.conftest import Server, make_server
from tests.cluster.fakes import (
    ANSWER,
    CACHED,
    MAX_MODEL_LEN,
    answer_tokens,
    say,
    small_model,
    small_tokenizer,
)

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
HELLO_PROMPT = "<s><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def prompt_of(server: Server) -> str:
    return small_tokenizer().decode(server.backend.last.prompt_token_ids)


async def test_whole_answer(server: Server) -> None:
    answer = await server.ok(PATH, model="tiny", messages=HELLO)
    assert prompt_of(server) == HELLO_PROMPT
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "small")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    num_prompt = len(small_tokenizer().encode(HELLO_PROMPT))
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED}
    # Nothing said: as many tokens as fit.
    assert server.backend.last.params.max_tokens == MAX_MODEL_LEN - num_prompt


async def test_stream_begins_with_the_role_and_ends_with_the_reason(server: Server) -> None:
    events = await server.events(PATH, messages=HELLO, n=2)
    for index in (0, 1):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(list(choice["delta"]) == ["content"] for choice in choices[1:-1])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "stop"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({tuple(choice) for event in events for choice in event["choices"]}) == 1


async def test_logprobs(server: Server) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    content = (await server.ok(PATH, **body))["choices"][0]["logprobs"]["content"]
    ids = answer_tokens()
    assert [entry["logprob"] for entry in content] == [-i / 1000 for i in ids]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(ids)
    assert content[0]["top_logprobs"][0] == {
        key: content[0][key] for key in ("token", "logprob", "bytes")
    }
    # The bytes are exact where the text cannot be.
    shown = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert shown.decode() == ANSWER
    events = await server.events(PATH, **body)
    streamed = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    assert [entry for logprobs in streamed for entry in logprobs["content"]] == content
    body = {"messages": HELLO, "logprobs": True}
    content = (await server.ok(PATH, **body))["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


async def test_held_back_text_loses_no_logprobs(server: Server) -> None:
    """Text that may be a stop string waits; its tokens' logprobs come with them."""
    body = {"messages": HELLO, "logprobs": True, "stop": "quick brown fox, never"}
    events = await server.events(PATH, **body)
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert len(entries) == len(answer_tokens())


async def test_token_ids_and_prompt_logprobs_stand_beside_the_choices(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 0}
    answer = await server.ok(PATH, **body)
    assert answer["prompt_token_ids"] == list(server.backend.last.prompt_token_ids)
    assert answer["choices"][0]["token_ids"] == answer_tokens()[:2]
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])


async def test_a_stream_begins_with_the_prompts_token_ids(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "n": 2}
    first, *rest = await server.events(PATH, **body, return_token_ids=True)
    assert first["prompt_token_ids"] == list(server.backend.last.prompt_token_ids)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert rest
    assert not any("prompt_token_ids" in event for event in rest)
    events = await server.events(PATH, **body)
    assert not any("prompt_token_ids" in event for event in events)


async def test_template_options_reach_the_template(server: Server) -> None:
    await server.ok(PATH, messages=HELLO, add_generation_prompt=False)
    assert prompt_of(server) == "<s><|im_start|>user\nHello<|im_end|>\n"
    chat = [*HELLO, {"role": "assistant", "content": "I am"}]
    await server.ok(PATH, messages=chat, continue_final_message=True)
    assert prompt_of(server).endswith("<|im_start|>assistant\nI am")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await server.ok(PATH, messages=[{"role": "user", "content": parts}])
    assert "user\na\nb<|im_end|>" in prompt_of(server)


async def test_an_effort_reaches_a_template_that_reads_it(server: Server) -> None:
    special = SpecialTokens({}, (), ())
    template = ChatTemplate({"default": "{{ reasoning_effort }}"}, special, "x")
    thinker = make_server(model=replace(small_model(), chat_template=template))
    await thinker.ok(PATH, messages=HELLO, reasoning_effort="xhigh")
    assert prompt_of(thinker) == "xhigh"
    for asked, effort in ((server, "low"), (thinker, "a lot")):
        response = await asked.post(PATH, messages=HELLO, reasoning_effort=effort)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "reasoning_effort"


async def test_messages_of_earlier_answers_are_taken_back(server: Server) -> None:
    """As the official client dumps them, with their nulls."""
    earlier = {
        **{"role": "assistant", "content": "Hi.", "refusal": None, "annotations": None},
        **{"audio": None, "function_call": None, "tool_calls": None},
    }
    await server.ok(PATH, messages=[*HELLO, earlier, *HELLO])
    assert "assistant\nHi.<|im_end|>" in prompt_of(server)


async def test_what_marks_a_prefix_for_a_cache_changes_nothing() -> None:
    """As clients send it that know Anthropic's API, or OpenAI's explicit breakpoints: templates
    print all of a tool."""
    source = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    special = SpecialTokens({}, (), ())
    model = replace(small_model(), chat_template=ChatTemplate({"default": source}, special, "x"))
    server = make_server(model=model)
    ephemeral = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    prompts = []
    for mark in ({}, ephemeral):
        explicit = {"prompt_cache_breakpoint": {"mode": "explicit"}} if mark else {}
        part = {"type": "text", "text": "a", **mark, **explicit}
        messages = [{"role": "user", "content": [part], **mark}]
        function = {"name": "f", "parameters": {"properties": {"cache_control": {}}}, **mark}
        tools = [{"type": "function", "function": function, **mark}]
        await server.ok(PATH, messages=messages, tools=tools, max_tokens=1, **mark)
        prompts.append(prompt_of(server))
    assert prompts[0] == prompts[1]
    assert '"a"' in prompts[0]
    assert '"cache_control": {}' in prompts[0]


async def test_no_tool_calls_are_none_to_templates() -> None:
    """Which ask whether a message has them, and then show no content."""
    source = "{% for m in messages %}{{ m.tool_calls is defined }} {{ m.content }}{% endfor %}"
    special = SpecialTokens({}, (), ())
    model = replace(small_model(), chat_template=ChatTemplate({"default": source}, special, "x"))
    server = make_server(model=model)
    message = {"role": "assistant", "content": "Hi.", "tool_calls": []}
    await server.ok(PATH, messages=[message], max_tokens=1)
    assert prompt_of(server) == "False Hi."


async def test_what_a_template_refuses_is_unprocessable(server: Server) -> None:
    response = await server.post(PATH, messages=[{"role": "bad", "content": ""}])
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert "no such role" in error["message"]


async def test_base_models_say_that_they_cannot_chat() -> None:
    server = make_server(model=small_model(chat=False))
    response = await server.post(PATH, messages=HELLO)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit(server: Server, name: str) -> None:
    answer = await server.ok(PATH, messages=HELLO, **{name: 3})
    assert answer["usage"]["completion_tokens"] == 3
    response = await server.post(PATH, messages=HELLO, max_tokens=3, max_completion_tokens=4)
    assert response.json()["error"]["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("path", "asked"), [(PATH, {"messages": HELLO}), ("/v1/completions", {"prompt": "Tell me"})]
)
async def test_request_then_model_then_openai_decide_the_sampling(
    path: str, asked: dict[str, Any]
) -> None:
    """What a request says also where it is nothing, as a temperature of 0."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    openai: dict[str, Any] = dict(zip(names, (1.0, 1.0, 0, 0.0, 1.0), strict=True))
    models: dict[str, Any] = dict(zip(names, (0.6, 0.9, 9, 0.1, 1.2), strict=True))
    said: dict[str, Any] = dict(zip(names, (0.0, 1.0, -1, 0.0, 1.0), strict=True))

    async def taken(server: Server, **fields: Any) -> tuple[dict[str, Any], int | None]:
        await server.ok(path, **asked, **fields)
        params = server.backend.last.params
        return {name: getattr(params, name) for name in names}, params.max_tokens

    plain = make_server()
    assert (await taken(plain))[0] == openai
    assert await taken(plain, **models, max_tokens=9) == (models, 9)
    defaults = GenerationDefaults(**models, max_new_tokens=7)
    server = make_server(model=small_model(defaults))
    assert await taken(server) == (models, 7)
    for name, value in said.items():
        assert await taken(server, **{name: value}) == ({**models, name: max(value, 0)}, 7)
    assert await taken(server, **said, max_tokens=9) == ({**said, "top_k": 0}, 9)


async def test_a_seed_is_drawn_where_none_is_given(server: Server) -> None:
    seeds = set()
    for _ in range(2):
        await server.ok(PATH, messages=HELLO)
        seeds.add(server.backend.last.params.seed)
    assert len(seeds) == 2
    assert None not in seeds
    await server.ok(PATH, messages=HELLO, seed=7)
    assert server.backend.last.params.seed == 7


async def test_every_parameter_reaches_the_engine(server: Server) -> None:
    sampling = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 11,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 1,
    }
    lists: dict[str, list[Any]] = {
        "allowed_token_ids": [1, 2, 3],
        "stop_token_ids": [4],
        "stop": ["zzz"],
    }
    bias = {"5": -1.5}
    body = {**sampling, **lists, "logit_bias": bias, "logprobs": True, "top_logprobs": 4}
    body |= {"priority": -3, "cache_salt": "tenant", "user": "x", "metadata": {"a": "b"}}
    await server.ok(PATH, messages=HELLO, **body)
    request = server.backend.last
    for name, value in sampling.items():
        assert getattr(request.params, name) == value
    for name, values in lists.items():
        assert getattr(request.params, name) == tuple(values)
    assert request.params.logit_bias == {5: -1.5}
    assert request.params.logprobs == 4
    assert (request.priority, request.cache_salt) == (-3, "tenant")


async def test_min_tokens_keep_stop_strings_from_ending(server: Server) -> None:
    server.backend.script = say("one two one two")
    body = {"messages": HELLO, "stop": "two"}
    assert (await server.ok(PATH, **body))["choices"][0]["message"]["content"] == "one "
    at_least = len(small_tokenizer().encode("one two"))
    answer = await server.ok(PATH, **body, min_tokens=at_least)
    assert answer["choices"][0]["message"]["content"] == "one two one "
