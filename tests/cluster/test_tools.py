"""Tool calls and reasoning of a chat, streamed and not."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from cluster.front_args import FrontArgs
from cluster.openai.body import from_fields
from cluster.openai.chat_request import ChatRequest
from cluster.openai.reading.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format,
    tool_format,
)
from cluster.openai.reading.gemma import GEMMA4
from cluster.served_model import ServedModel
from cluster.validation import checked
from engine.errors import ConfigError
from engine.generation_defaults import GenerationDefaults
from engine.request import FinishReason, GenerationUpdate
from engine.text.chat_template import ChatTemplate
from engine.text.special_tokens import SpecialTokens
from engine.text.tokenizer import Tokenizer
from tests.cluster.conftest import Server, make_server
from tests.cluster.fakes import (
    TEMPLATE,
    Script,
    delta,
    prompt_report,
    say,
    small_model,
    small_tokenizer,
)
from tests.cluster.live_server import LiveServer, live_server
from tests.engine.text.small_tokenizers import byte_level, wrapped

PATH = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "buy")
]
LOOK, BUY = '{"name": "look", "arguments": {"at": "🦊"}}', '{"name": "buy", "arguments": {}}'
ANSWER = (
    f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{LOOK}\n</tool_call>\n"
    f"<tool_call>{BUY}</tool_call>"
)
KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
TEMPLATES = TEMPLATE + "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}</think>"


def model_that_thinks(tokenizer: Tokenizer | None = None, **parsers: Any) -> ServedModel:
    model = small_model()
    special = SpecialTokens({"bos_token": "<s>"}, (), ())
    template = ChatTemplate({"default": TEMPLATES}, special, "tests")
    tokenizer = tokenizer or model.tokenizer
    return replace(model, tokenizer=tokenizer, chat_template=template, **parsers)


def server_that_says(text: str, per_step: int = 1, **parsers: Any) -> Server:
    return make_server(say(text, per_step), model_that_thinks(**parsers))


def message_of_events(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """What a client puts together, and the reason of the end."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = ""
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({**call, "function": {**call["function"]}})
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
            assert delta or choice["finish_reason"] or choice["logprobs"], "an event of nothing"
            finish = choice["finish_reason"] or finish
    return message, finish


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_streamed_and_not_the_message_is_the_same(per_step: int) -> None:
    server = server_that_says(ANSWER, per_step)
    (choice,) = (await server.ok(PATH, messages=HELLO, tools=TOOLS))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
    calls = message["tool_calls"]
    assert [call["type"] for call in calls] == ["function"] * 2
    assert [call["function"] for call in calls] == [
        {"name": "look", "arguments": '{"at": "🦊"}'},
        {"name": "buy", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    streamed, finish = message_of_events(await server.events(PATH, messages=HELLO, tools=TOOLS))
    assert finish == "tool_calls"
    assert streamed["content"] == "I look."
    assert streamed["reasoning_content"] == "Hm."
    assert [call["function"] for call in streamed["tool_calls"]] == [c["function"] for c in calls]


@pytest.mark.parametrize(
    ("more", "content"), [({}, ""), ({"tools": TOOLS}, None), ({"tool_choice": "none"}, "")]
)
async def test_a_stream_that_may_be_calls_alone_begins_with_no_text(
    more: dict[str, Any], content: str | None
) -> None:
    server = server_that_says(ANSWER)
    first, *_ = await server.events(PATH, messages=HELLO, **{"tools": None, **more})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": content}


async def test_every_choice_has_its_own() -> None:
    server = server_that_says(ANSWER, 2)
    events = await server.events(PATH, messages=HELLO, tools=TOOLS, n=3)
    for index in range(3):
        own = [{"choices": [c for c in e["choices"] if c["index"] == index]} for e in events]
        message, finish = message_of_events(own)
        assert (message["content"], finish) == ("I look.", "tool_calls")
        assert len(message["tool_calls"]) == 2


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_usage_says_how_many_tokens_are_reasoning(per_step: int) -> None:
    server = server_that_says(ANSWER, per_step)
    tokenizer = model_that_thinks().tokenizer
    whole = (await server.ok(PATH, messages=HELLO, n=2, return_token_ids=True))["choices"]
    (ids, other) = (choice["token_ids"] for choice in whole)
    assert ids == other
    begin, end = (
        next(n for n in range(len(ids)) if mark in tokenizer.decode(ids[:n]))
        for mark in ("<think>", "</think>")
    )
    # The end's mark is several tokens here, and none of them is reasoning.
    num = end - begin - len(tokenizer.encode("</think>"))
    assert num >= 3
    details = {"reasoning_tokens": 2 * num}
    for body in ({}, {"include_reasoning": False}, {"tools": TOOLS}):
        answer = await server.ok(PATH, messages=HELLO, n=2, **body)
        assert answer["usage"]["completion_tokens_details"] == details
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await server.events(PATH, messages=HELLO, n=2, stream_options=options, **body)
        assert events[-1]["usage"] == answer["usage"]
    events = await server.events(PATH, messages=HELLO, n=2)
    assert not any(event.get("usage") for event in events)
    plain = make_server(say(ANSWER))
    assert "completion_tokens_details" not in (await plain.ok(PATH, messages=HELLO))["usage"]


async def test_without_tools_calls_are_text() -> None:
    server = server_that_says(f"<tool_call>{LOOK}</tool_call>")
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = (await server.ok(PATH, messages=HELLO, **body))["choices"]
        assert choice["message"]["content"] == f"<tool_call>{LOOK}</tool_call>"
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


async def test_an_answer_that_was_cut_off_ends_for_its_length() -> None:
    server = server_that_says(ANSWER)
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 75}
    (choice,) = (await server.ok(PATH, **body))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("per_step", [1, 1000])
@pytest.mark.parametrize(
    ("stop", "finish", "ended"), [('t": "', "stop", 0), ("<tool_call>{", "tool_calls", 1)]
)
async def test_a_stop_string_within_a_call_s_arguments_is_no_end_of_the_call(
    stop: str, finish: str, ended: int, per_step: int
) -> None:
    """Behind a call that has ended it is one."""
    server = server_that_says(ANSWER, per_step)
    body = {"messages": HELLO, "tools": TOOLS, "stop": stop}
    (choice,) = (await server.ok(PATH, **body))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stop)
    message, streamed = message_of_events(await server.events(PATH, **body))
    assert streamed == finish
    for calls in (choice["message"]["tool_calls"], message["tool_calls"]):
        (arguments,) = [call["function"]["arguments"] for call in calls]
        assert arguments == ('{"at": "🦊"}' if ended else '{"a')


async def test_one_call_and_no_reasoning_where_clients_want_that() -> None:
    server = server_that_says(ANSWER)
    body = {"messages": HELLO, "tools": TOOLS}
    body |= {"parallel_tool_calls": False, "include_reasoning": False}
    message = (await server.ok(PATH, **body))["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]
    assert "reasoning_content" not in message
    streamed, _ = message_of_events(await server.events(PATH, **body))
    assert len(streamed["tool_calls"]) == 1
    assert streamed["reasoning_content"] == ""


async def test_logprobs_of_text_that_waits_are_not_lost() -> None:
    server = server_that_says(ANSWER)
    body = {"messages": HELLO, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    whole = (await server.ok(PATH, **body))["choices"][0]
    choices = [c for event in await server.events(PATH, **body) for c in event["choices"]]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert [i for c in choices for i in c.get("token_ids", ())] == whole["token_ids"]


async def test_a_prompt_that_opens_the_reasoning() -> None:
    model = model_that_thinks()
    special = SpecialTokens({"bos_token": "<s>"}, (), ())
    source = TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%") + "{# </think> #}"
    model = replace(model, chat_template=ChatTemplate({"default": source}, special, "tests"))
    server = make_server(say("Hm.\n</think>\nYes."), model)
    message = (await server.ok(PATH, messages=HELLO))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    # A prompt without it, by the same template.
    server.backend.script = say("Yes.</think>")
    body = {"messages": HELLO, "add_generation_prompt": False}
    message = (await server.ok(PATH, **body))["choices"][0]["message"]
    assert message["content"] == "Yes.</think>"


async def test_marks_that_are_special_tokens_are_seen_and_no_others_shown() -> None:
    backend = byte_level()
    backend.add_special_tokens(["[TOOL_CALLS]", "[THINK]"])
    tokenizer = wrapped(backend)
    text = f"Well<|im_start|>.[TOOL_CALLS][{LOOK}]"
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id or 0]

    def script(request: Any) -> Iterator[Any]:
        deltas = [delta(request, 0, ids, FinishReason.STOP)]
        yield GenerationUpdate(deltas, prompt_report(request))

    server = make_server(script, model_that_thinks(tokenizer, tool_parser="mistral"))
    message = (await server.ok(PATH, messages=HELLO, tools=TOOLS))["choices"][0]["message"]
    assert message["content"] == "Well."
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "look"
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    # Where nobody looks for calls, a mark shows as little as any special token.
    message = (await server.ok(PATH, messages=HELLO))["choices"][0]["message"]
    assert message["content"] == f"Well.[{LOOK}]"


@pytest.mark.parametrize(
    ("begun", "said", "reasoning", "content"),
    [
        ("<think>I think", " so.</think>\nYes.", "so.", "Yes."),
        ([{"type": "text", "text": t} for t in ("<think>", "I")], "s.</think>Yes.", "s.", "Yes."),
        ("<think>I think so.</think>", "Yes.", None, "Yes."),
        ("The tag is <think>", "Hm.</think>Yes.", "Hm.", "Yes."),
        ("The tag <think> is", " that.</think>", None, " that.</think>"),
        ("Ye", "s.", None, "s."),
    ],
)
async def test_a_message_that_is_continued_within_its_reasoning(
    begun: Any, said: str, reasoning: str | None, content: str
) -> None:
    """What its user says of marks is nothing to it."""
    server = server_that_says(said)
    user = {"role": "user", "content": "What is <think>?"}
    chat = [user, {"role": "assistant", "content": begun}]
    body = {"messages": chat, "continue_final_message": True}
    (choice,) = (await server.ok(PATH, **body))["choices"]
    assert choice["message"].get("reasoning_content") == reasoning
    assert choice["message"]["content"] == content


async def test_calls_and_reasoning_go_back_into_a_prompt() -> None:
    server = server_that_says(ANSWER)
    message = (await server.ok(PATH, messages=HELLO, tools=TOOLS))["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        for call in message["tool_calls"]
    ]
    await server.ok(PATH, messages=[*HELLO, message, *results], tools=TOOLS)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", None, None),
        ("<tool_call>\n{{ x }}</tool_call> <think></think>", "hermes", "think"),
        ("{{ '<start_function_call>call:' }}", "functiongemma", None),
        ("<|channel>thought\n<channel|> {{ '<|tool_call>call:' }}", "gemma4", "gemma4"),
        ("<tool_call>\n<function=example>", None, None),
        ("<tool_call>\n<function=example>\n<parameter=one>", "qwen3_coder", None),
        ("<seed:tool_call>\n<function=example>\n<parameter=one> </seed:think>", "seed_oss", "seed"),
        ("<minimax:tool_call>\n<invoke name=", "minimax_m2", None),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key></think>", "glm45", "think"),
        ("Environment: ipython <function=example>{", None, None),
        ("{{ '[TOOL_CALLS]' }} [THINK] [/THINK]", "mistral", "mistral"),
        ("respond only with <|tool_call|> and not <tool_call>", "granite", None),
        ("wrapped in <function_calls></function_calls> </think>", "olmo3", "think"),
        ("within <tool_call></tool_call>:\n<tool_calls>[{'name':", "hunyuan_a13b", None),
        ("respond with <|tool_call|>{call}<|/tool_call|>", "phi4_mini", None),
        ("prefix function calls with functools[{call}]", "phi4_mini", None),
        ("{{ '<TOOLCALL>[' }}{{ call }}]</TOOLCALL> </think>", "nemotron", "think"),
        ("<｜tool▁call▁begin｜>{{ call }}<｜tool▁sep｜> </think>", "deepseek_v3", "think"),
        ("<|tool_call_begin|>{{ call }}<|tool_call_argument_begin|>", "kimi_k2", None),
        ("Environment: ipython", "llama3_json", None),
        ("<|python_tag|> {'name': 'x', 'parameters': {}}", "llama3_json", None),
        ("Environment: ipython [func_name1(params_name1=params_value1)]", "pythonic", None),
    ],
)
def test_the_template_tells_the_formats(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    assert tool_format("auto", [template]) is (tools and TOOL_FORMATS[tools])
    assert reasoning_format("auto", [template]) is (reasoning and REASONING_FORMATS[reasoning])
    assert tool_format("none", [template]) is None
    assert reasoning_format("none", [template]) is None
    assert tool_format("mistral", [template]) is TOOL_FORMATS["mistral"]


async def test_bare_values_have_the_types_of_the_request_s_schemas() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    tools.append({"type": "function", "function": {"name": "g"}})
    values = "\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
    text = "".join(f"<tool_call>\n<function={name}>{values}" for name in "fg")
    server = server_that_says(text, 3, tool_parser="qwen3_coder")
    (choice,) = (await server.ok(PATH, messages=HELLO, tools=tools))["choices"]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [
        {"name": "f", "arguments": '{"n": "1"}'},
        {"name": "g", "arguments": '{"n": 1}'},
    ]
    assert choice["finish_reason"] == "tool_calls"
    streamed, finish = message_of_events(await server.events(PATH, messages=HELLO, tools=tools))
    assert [call["function"] for call in streamed["tool_calls"]] == calls
    assert finish == "tool_calls"


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_gemma_s_marks_are_read_though_they_are_special_tokens(per_step: int) -> None:
    backend = byte_level()
    backend.add_special_tokens([*GEMMA4, "<|channel>", "<channel|>", "<|tool_response>"])
    tokenizer = wrapped(backend)
    text = (
        "<|channel>thought\nHm.\n<channel|>I look."
        '<|tool_call>call:look{at:<|"|>🦊<|"|>}<tool_call|><|tool_call>call:buy{}<tool_call|>'
    )
    parsers = {"tool_parser": "gemma4", "reasoning_parser": "gemma4"}
    model = model_that_thinks(tokenizer, **parsers)
    server = make_server(say(f"{text}<|tool_response>", per_step, tokenizer), model)
    for tools, calls in (
        (TOOLS, [("look", '{"at": "🦊"}'), ("buy", "{}")]),
        (None, []),
    ):
        body = {"messages": HELLO} | ({"tools": tools} if tools else {})
        answer = await server.ok(PATH, **body)
        message = answer["choices"][0]["message"]
        streamed, _ = message_of_events(await server.events(PATH, **body))
        for said in (message, streamed):
            assert said["reasoning_content"] == "Hm."
            assert said["content"].startswith("I look.")
            called = [one["function"] for one in said.get("tool_calls", ())]
            assert [(one["name"], one["arguments"]) for one in called] == calls
        num = len(tokenizer.encode("\nHm.\n"))
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}


@pytest.mark.parametrize(
    ("text", "choice", "ids"),
    [
        (KIMI.format("functions.look:3"), "auto", ["functions.look:3"]),
        (KIMI.format("look") * 2, "auto", ["functions.look:1", "functions.look:2"]),
        (f"[{LOOK}, {BUY}]", "required", ["functions.look:1", "functions.buy:2"]),
        ("{}", {"type": "function", "function": {"name": "buy"}}, ["functions.buy:1"]),
    ],
)
async def test_ids_say_the_name_where_the_template_says_nothing_else(
    text: str, choice: Any, ids: list[str]
) -> None:
    """Kimi's puts them before a call's arguments, and before what the tool said."""
    ends = GenerationDefaults(eos_token_ids=(small_tokenizer().eos_token_id or 0,))
    server = server_that_says(text, 3, tool_parser="kimi_k2", defaults=ends)
    call = {"id": "functions.look:0", "function": {"name": "look", "arguments": "{}"}}
    chat = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "a fox"},
    ]
    body = {"messages": chat, "tools": TOOLS, "tool_choice": choice}
    message = (await server.ok(PATH, **body))["choices"][0]["message"]
    streamed, _ = message_of_events(await server.events(PATH, **body))
    for said in (message, streamed):
        assert [call["id"] for call in said["tool_calls"]] == ids
        for one in said["tool_calls"]:
            assert one["function"]["name"] in one["id"]


@pytest.mark.parametrize(
    ("end", "content", "names", "finish"),
    [(")]", "", ["look", "buy"], "tool_calls"), ("", "[look(at='🦊'), buy(", [], "stop")],
)
async def test_calls_that_are_known_at_the_end_come_with_it(
    end: str, content: str, names: list[str], finish: str
) -> None:
    server = server_that_says(f"[look(at='🦊'), buy({end}", 3, tool_parser="pythonic")
    (choice,) = (await server.ok(PATH, messages=HELLO, tools=TOOLS))["choices"]
    streamed, streamed_finish = message_of_events(
        await server.events(PATH, messages=HELLO, tools=TOOLS)
    )
    assert choice["finish_reason"] == streamed_finish == finish
    for message in (choice["message"], streamed):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert (message["content"] or "") == content
        assert [call["name"] for call in calls] == names
        assert [call["arguments"] for call in calls] == ['{"at": "🦊"}', "{}"][: len(names)]


async def test_the_operator_decides() -> None:
    server = server_that_says(ANSWER, tool_parser="none", reasoning_parser="none")
    message = (await server.ok(PATH, messages=HELLO, tools=TOOLS))["choices"][0]["message"]
    assert message["content"] == ANSWER
    with pytest.raises(ConfigError, match="tool_call_parser: 'x', must be one of auto, none, her"):
        checked(FrontArgs, {"tool_call_parser": "x"})


@pytest.fixture
def live() -> Iterator[LiveServer]:
    with live_server(model_that_thinks()) as server:
        yield server


def test_official_client_calls_tools(live: LiveServer) -> None:
    live.backend.script = answers = Answers()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        messages = list(HELLO)
        first = client.chat.completions.create(model="small", messages=messages, tools=TOOLS)
        message = first.choices[0].message
        assert message.tool_calls
        assert json.loads(message.tool_calls[0].function.arguments) == {"at": "🦊"}  # type: ignore[union-attr]
        messages.append(message)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "red"}
        messages.append(result)
        answers.text = "It is red."
        second = client.chat.completions.create(model="small", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "It is red."
        usages: Any = [first.usage, second.usage]
        counts = [usage.completion_tokens_details.reasoning_tokens for usage in usages]
        assert counts[0] > counts[1] == 0
        answers.text = ANSWER
        with client.chat.completions.stream(model="small", messages=HELLO, tools=TOOLS) as stream:
            names = [
                event.name for event in stream if event.type == "tool_calls.function.arguments.done"
            ]
            final = stream.get_final_completion().choices[0]
        assert names == ["look", "buy"]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls
        assert final.message.tool_calls[0].function.arguments == '{"at": "🦊"}'


class Answers:
    def __init__(self) -> None:
        self.text = ANSWER

    def __call__(self, request: Any) -> Iterator[Any]:
        script: Script = say(self.text, 2)
        return script(request)


class Look(BaseModel):
    at: str


class Buy(BaseModel):
    pass


def test_official_client_sends_back_what_it_has_parsed(live: LiveServer) -> None:
    live.backend.script = Answers()
    tools = [openai.pydantic_function_tool(Look, name="look")]
    tools.append(openai.pydantic_function_tool(Buy, name="buy"))
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        called = client.chat.completions.parse(model="small", messages=HELLO, tools=tools)
        message: Any = called.choices[0].message
        assert message.tool_calls[0].function.parsed_arguments == Look(at="🦊")
        client.chat.completions.parse(model="small", messages=[*HELLO, message], tools=tools)


def test_what_a_client_has_parsed_is_not_the_templates() -> None:
    function = {"name": "look", "arguments": '{"at": "here"}'}
    call = {"id": "1", "type": "function", "function": function}
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    parsed = {"at": "here"}
    sent_call = {**call, "function": {**function, "parsed_arguments": parsed}}
    sent = {**message, "parsed": parsed, "tool_calls": [sent_call]}
    request = from_fields(ChatRequest, {"messages": [sent]})
    assert request.chat_messages() == [message]
