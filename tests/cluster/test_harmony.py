"""Answers of gpt-oss, which are messages, as a client of the API sees them."""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from cluster.openai.reading.formats import HARMONY, harmony_format
from cluster.openai.reading.harmony import Harmony
from cluster.openai.reading.harmony_messages import MARKS
from cluster.served_model import ServedModel
from engine.generation_defaults import GenerationDefaults
from engine.text.chat_template import ChatTemplate
from engine.text.special_tokens import SpecialTokens
from engine.text.tokenizer import Tokenizer
from tests.cluster.conftest import Server, make_server
from tests.cluster.fakes import answer_tokens, say, small_model
from tests.cluster.live_server import live_server
from tests.cluster.test_tools import PATH, message_of_events
from tests.engine.text.harmony_template import HARMONY as TEMPLATE
from tests.engine.text.small_tokenizers import byte_level, wrapped

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"to {name}",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
    for name in ("look", "buy")
]
ANALYSIS = "<|channel|>analysis<|message|>We need 🦊.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
SAYS = f"{ANALYSIS}{FINAL}Hello, fox!"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
TO_LOOK = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
LOOK = f'<|start|>assistant{TO_LOOK}{{"at": "🦊"}}'
CALLS = ANALYSIS + PREAMBLE + LOOK


@functools.cache
def tokenizer() -> Tokenizer:
    """The marks are special tokens, as gpt-oss has them."""
    backend = byte_level()
    backend.add_special_tokens(list(MARKS))
    return wrapped(backend)


def harmony_model(**parsers: Any) -> ServedModel:
    template = ChatTemplate({"default": TEMPLATE}, SpecialTokens({}, (), ()), "tests")
    ends = GenerationDefaults(eos_token_ids=(tokenizer().eos_token_id or 0,))
    model = replace(small_model(ends), max_model_len=2048)
    return replace(model, tokenizer=tokenizer(), chat_template=template, **parsers)


def server_that_says(text: str, per_step: int = 1, **parsers: Any) -> Server:
    return make_server(say(text, per_step, tokenizer()), harmony_model(**parsers))


async def answered(server: Server, **body: Any) -> tuple[dict[str, Any], str]:
    """The message and the reason of its end, which are the same when they are streamed."""
    asked = {"messages": HELLO, **body}
    (choice,) = (await server.ok(PATH, **asked))["choices"]
    message, finish = choice["message"], choice["finish_reason"]
    streamed, streamed_finish = message_of_events(await server.events(PATH, **asked))
    assert streamed_finish == finish
    for key in ("content", "reasoning_content"):
        assert streamed[key] == (message.get(key) or "")
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert [call["function"] for call in streamed["tool_calls"]] == calls
    return message, finish


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_analysis_is_reasoning_and_final_is_content(per_step: int) -> None:
    message, finish = await answered(server_that_says(SAYS, per_step))
    assert (message["reasoning_content"], message["content"]) == ("We need 🦊.", "Hello, fox!")
    assert finish == "stop"


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_commentary_is_a_call_or_content(per_step: int) -> None:
    message, finish = await answered(server_that_says(CALLS, per_step), tools=TOOLS)
    assert (message["reasoning_content"], message["content"]) == ("We need 🦊.", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "look", "arguments": '{"at": "🦊"}'}
    ]
    assert finish == "tool_calls"


async def test_without_tools_a_call_is_text() -> None:
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message, finish = await answered(server_that_says(ANALYSIS + LOOK), **body)
        assert (message["content"], finish) == ('{"at": "🦊"}', "stop")
        assert "tool_calls" not in message


async def test_reasoning_may_be_left_out_and_its_tokens_are_counted() -> None:
    num = len(tokenizer().encode("We need 🦊."))
    for text in (SAYS, CALLS):
        server = server_that_says(text, 2)
        message, _ = await answered(server, tools=TOOLS, include_reasoning=False)
        assert "reasoning_content" not in message
        for body in ({}, {"include_reasoning": False}, {"tools": TOOLS}, {"n": 2}):
            usage = (await server.ok(PATH, messages=HELLO, **body))["usage"]
            expected = {"reasoning_tokens": num * body.get("n", 1)}
            assert usage["completion_tokens_details"] == expected
            options = {"include_usage": True}
            events = await server.events(PATH, messages=HELLO, stream_options=options, **body)
            assert events[-1]["usage"] == usage


async def test_wherever_it_is_cut_off_nothing_is_made_up() -> None:
    tokens = answer_tokens(CALLS, tokenizer())[:-1]
    reasoning, content, arguments = "We need 🦊.", "I look.", '{"at": "🦊"}'
    server = server_that_says(CALLS)
    for num in range(1, len(tokens) + 1):
        message, finish = await answered(server, tools=TOOLS, max_tokens=num)
        assert finish == "length"
        # A character that was cut off in the middle is a replacement.
        said = [message.get("reasoning_content", ""), message["content"] or ""]
        said += [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        for whole, text in zip((reasoning, content, arguments), said, strict=False):
            assert whole.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))


@pytest.mark.parametrize(
    ("parsers", "reasoning", "content", "calls"),
    [
        ({}, "We need 🦊.", "I look.", 1),
        ({"tool_parser": HARMONY, "reasoning_parser": HARMONY}, "We need 🦊.", "I look.", 1),
        ({"tool_parser": "none"}, "We need 🦊.", 'I look.\n\n{"at": "🦊"}', 0),
        ({"reasoning_parser": "none"}, "", "We need 🦊.\n\nI look.", 1),
    ],
)
async def test_the_operator_decides_what_is_told_apart(
    parsers: dict[str, Any], reasoning: str, content: str, calls: int
) -> None:
    message, _ = await answered(server_that_says(CALLS, **parsers), tools=TOOLS)
    assert message.get("reasoning_content", "") == reasoning
    assert message["content"] == content
    assert len(message.get("tool_calls", ())) == calls


async def test_without_a_parser_all_of_it_is_text() -> None:
    server = server_that_says(SAYS, tool_parser="none", reasoning_parser="none")
    message, _ = await answered(server)
    assert message["content"] == "analysisWe need 🦊.assistantfinalHello, fox!"
    shown = (await server.ok(PATH, messages=HELLO, skip_special_tokens=False))["choices"][0]
    assert shown["message"]["content"] == SAYS


async def test_special_tokens_may_be_shown() -> None:
    message, _ = await answered(server_that_says(CALLS), tools=TOOLS, skip_special_tokens=False)
    assert message["content"] == "I look."
    assert len(message["tool_calls"]) == 1


async def test_a_model_that_writes_no_messages_has_all_it_says_as_content() -> None:
    message, _ = await answered(server_that_says(" to be, or not to=be\n", 2), tools=TOOLS)
    assert message["content"] == " to be, or not to=be\n"


async def test_a_message_that_is_continued_is_the_final_one() -> None:
    server = server_that_says("so.", 1)
    chat = [*HELLO, {"role": "assistant", "content": "I think "}]
    message, _ = await answered(server, messages=chat, continue_final_message=True)
    assert message == {"role": "assistant", "content": "so.", "refusal": None}


@pytest.mark.parametrize(("channel", "said"), [("analysis", ("Hm.", None)), ("final", ("", "Hm."))])
async def test_a_prompt_that_begins_a_message(channel: str, said: tuple[str, str | None]) -> None:
    begun = TEMPLATE.replace(
        '{{- "<|start|>assistant" }}',
        f'{{{{- "<|start|>assistant<|channel|>{channel}<|message|>" }}}}',
    )
    template = ChatTemplate({"default": begun}, SpecialTokens({}, (), ()), "tests")
    model = replace(harmony_model(), chat_template=template)
    server = make_server(say("Hm.", 1, tokenizer()), model)
    message, _ = await answered(server)
    assert (message.get("reasoning_content", ""), message["content"]) == said


REGEX = {"structured_outputs": {"regex": "[0-9]+"}}
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
NAMED = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}}
TO_ALL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("asked", "header"), [(REGEX, TO_ALL), (REQUIRED, TO_ALL), (NAMED, TO_LOOK)]
)
async def test_a_grammar_begins_in_the_message_that_it_is_of(
    asked: dict[str, Any], header: str
) -> None:
    """Behind what the model thinks, or where it would have begun to think."""
    server = server_that_says("")
    thinks, role = "<|channel|>analysis<|message|>", "<|start|>assistant"
    chat = [*HELLO, {"role": "assistant", "content": "I think"}]
    for body, begins in (
        ({}, (thinks, role + header, header)),
        ({"add_generation_prompt": False}, (role + thinks, role + header, role + header)),
        ({"messages": chat, "continue_final_message": True}, None),
    ):
        await server.ok(PATH, **{"messages": HELLO, **asked, **body})
        reasoning = server.backend.last.params.reasoning
        if begins is None:
            assert reasoning is None
        else:
            assert reasoning is not None
            sides = (reasoning.start, reasoning.then, reasoning.instead)
            assert tuple(map(tokenizer().decode, sides)) == begins
            assert tokenizer().decode([reasoning.end]) == "<|end|>"
        grammar = server.backend.last.params.grammar
        assert grammar is not None
        assert ('"maxItems":1' in grammar.text) is (asked is REQUIRED)
    server.model.grammar_trial.close()


async def test_without_reasoning_or_marks_of_its_own_a_grammar_begins_at_once() -> None:
    for model in (
        harmony_model(reasoning_parser="none"),
        replace(harmony_model(), tokenizer=small_model().tokenizer),
    ):
        server = make_server(say("7"), model)
        await server.ok(PATH, messages=HELLO, **REGEX)
        assert server.backend.last.params.reasoning is None
        server.model.grammar_trial.close()


CALL = '[{"name": "look", "arguments": {"at": "🦊"}}]'


@pytest.mark.parametrize(
    ("asked", "says", "finish"),
    [
        (REQUIRED, f"{ANALYSIS}{FINAL}{CALL}", "tool_calls"),
        (REQUIRED, f"{TO_ALL}{CALL}", "tool_calls"),
        (NAMED, f'{ANALYSIS}<|start|>assistant{TO_LOOK}{{"at": "🦊"}}', "stop"),
        (NAMED, f'{TO_LOOK}{{"at": "🦊"}}', "stop"),
        (NAMED, '{"at": "🦊"}', "stop"),
    ],
)
async def test_calls_that_must_be_are_read(asked: dict[str, Any], says: str, finish: str) -> None:
    server = server_that_says(says, 2)
    message, ended = await answered(server, **asked)
    assert message.get("reasoning_content") == ("We need 🦊." if ANALYSIS in says else None)
    assert not message["content"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": "🦊"}'}
    assert ended == finish
    server.model.grammar_trial.close()


def test_the_template_tells_and_so_does_the_operator() -> None:
    assert harmony_format("auto", "auto", [TEMPLATE]) == Harmony()
    assert harmony_format("auto", "auto", ["<|start|>system<|message|>"]) is None
    assert harmony_format("none", "none", [TEMPLATE]) is None
    assert harmony_format("hermes", "auto", [TEMPLATE]) == Harmony(has_calls=False)
    assert harmony_format("harmony", "none", []) == Harmony(has_reasoning=False)


@pytest.fixture
def client() -> Iterator[tuple[openai.OpenAI, Any]]:
    with (
        live_server(harmony_model()) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, server.backend


def test_official_client_calls_a_tool_and_sends_back_what_it_got(
    client: tuple[openai.OpenAI, Any],
) -> None:
    official, backend = client
    backend.script = say(ANALYSIS + LOOK, 2, tokenizer())
    chat = list(HELLO)
    with official.chat.completions.stream(model="small", messages=chat, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    message: Any = final.message
    assert final.finish_reason == "tool_calls"
    assert message.reasoning_content == "We need 🦊."
    assert json.loads(message.tool_calls[0].function.arguments) == {"at": "🦊"}
    backend.script = say(SAYS, 2, tokenizer())
    chat += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "red"}]
    second = official.chat.completions.create(model="small", messages=chat, tools=TOOLS)
    assert second.choices[0].message.content == "Hello, fox!"
    prompt = tokenizer().decode(backend.last.prompt_token_ids)
    assert prompt.endswith(
        f"<|start|>assistant{ANALYSIS}<|start|>assistant to=functions.look<|channel|>commentary "
        'json<|message|>{"at": "🦊"}<|call|><|start|>functions.look to=assistant<|channel|>'
        'commentary<|message|>"red"<|end|><|start|>assistant'
    )
