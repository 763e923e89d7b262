"""A grammar beside tools that a model may call: its answer fits, or calls."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.openai.reading.formats import TOOL_FORMATS
from cluster.served_model import ServedModel
from engine.generation_defaults import GenerationDefaults
from engine.grammar.value import Tokens
from engine.text.chat_template import ChatTemplate
from engine.text.special_tokens import SpecialTokens
from tests.cluster.conftest import make_server
from tests.cluster.fakes import small_model
from tests.cluster.reading.readers import (
    CALL,
    DEEPSEEK,
    FUNCTION_GEMMA_SAYS,
    GEMMA,
    GLM,
    KIMI,
    MINIMAX,
    OLMO,
    QWEN,
    SECTION,
    SEED,
    TOOLS,
    UNMARKED,
    read,
)
from tests.cluster.test_harmony import TO_LOOK, harmony_model, tokenizer
from tests.engine.text.small_tokenizers import byte_level, wrapped

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "Hi"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED: dict[str, Any] = {"messages": HI, "response_format": {"type": "json_object"}}
WRITTEN = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>"),
    ("qwen3_coder", QWEN),
    ("qwen3_coder", UNMARKED),
    ("seed_oss", SEED),
    ("minimax_m2", MINIMAX),
    ("glm45", GLM),
    ("mistral", f"[TOOL_CALLS][{CALL}]"),
    ("deepseek_v3", f"{SECTION}{DEEPSEEK}"),
    ("deepseek_v3", DEEPSEEK),
    ("kimi_k2", KIMI),
    ("granite", f"<|tool_call|>[{CALL}]"),
    ("granite", f"<tool_call>[{CALL}]"),
    ("nemotron", f"<TOOLCALL>[{CALL}]</TOOLCALL>"),
    ("hunyuan_a13b", f"<tool_calls>[{CALL}]</tool_calls>"),
    ("phi4_mini", f"<|tool_call|>[{CALL}]<|/tool_call|>"),
    ("phi4_mini", f"functools[{CALL}]"),
    ("gemma4", GEMMA),
    ("functiongemma", FUNCTION_GEMMA_SAYS),
    ("olmo3", OLMO),
    ("llama3_json", '{"name": "f", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}'),
    ("pythonic", "[f(a=1), g()]"),
]


def test_every_format_s_calls_begin_as_it_says() -> None:
    assert {name for name, _ in WRITTEN} == set(TOOL_FORMATS)
    for name, text in WRITTEN:
        tool_format = TOOL_FORMATS[name]
        _, content, calls = read(tool_format.make(TOOLS), [text])
        assert (content, bool(calls)) == ("", True)
        assert text.startswith(tuple(tool_format.beginnings(TOOLS)))


def model_of(*marks: str, **parsers: Any) -> ServedModel:
    """These are tokens of their own, and special ones."""
    backend = byte_level()
    backend.add_special_tokens(list(marks))
    source = (
        "{% for one in messages %}{{ one.content }}{% endfor %}{{ tools }}"
        "{% if open %}<think>{% endif %}"
    )
    template = ChatTemplate({"default": source}, SpecialTokens({}, (), ()), "tests")
    ends = GenerationDefaults(eos_token_ids=(2,))
    model = replace(small_model(ends), tokenizer=wrapped(backend), chat_template=template)
    return replace(model, **{"tool_parser": "hermes", "reasoning_parser": "none", **parsers})


def spelt(model: ServedModel, *texts: str) -> tuple[Tokens, ...]:
    return tuple(tuple(model.tokenizer.encode(t, add_special_tokens=False)) for t in texts)


@pytest.mark.parametrize("marks", [(), ("<tool_call>",)])
async def test_a_call_leads_out_where_the_model_may_call(marks: tuple[str, ...]) -> None:
    model = model_of(*marks)
    server = make_server(model=model)
    continued = {
        "messages": [*HI, {"role": "assistant", "content": "W"}],
        "continue_final_message": True,
    }
    async with server.client:
        for body, led_out in (
            ({"tools": [LOOK]}, True),
            ({"tools": [LOOK], "tool_choice": "auto"}, True),
            ({"tools": [LOOK], "tool_choice": "none"}, False),
            ({"tools": [LOOK], "tool_choice": "required", "response_format": None}, False),
            ({"tools": [LOOK], **continued}, False),
            ({"tools": []}, False),
            ({}, False),
        ):
            await server.ok(CHAT, **{**ASKED, **body})
            params = server.backend.last.params
            assert params.grammar is not None
            assert params.exits == (spelt(model, "<tool_call>") if led_out else ())
        await server.ok(CHAT, messages=HI, tools=[LOOK])
        assert server.backend.last.params.exits == (), "without a grammar there is no way out"
    model.grammar_trial.close()


async def test_so_does_one_behind_reasoning() -> None:
    model = model_of("<think>", "</think>", reasoning_parser="think")
    server = make_server(model=model)
    calls = spelt(model, "<tool_call>")
    async with server.client:
        for how, begun in (({}, False), ({"open": True}, True)):
            await server.ok(CHAT, **ASKED, tools=[LOOK], chat_template_kwargs=how)
            params = server.backend.last.params
            assert params.reasoning is not None
            assert params.reasoning.exits == params.exits == calls
            assert (params.reasoning.start == ()) is begun
    model.grammar_trial.close()


@pytest.mark.parametrize(
    ("parser", "begins"),
    [
        ("none", ()),
        ("qwen3_coder", ("<tool_call>", "<function=")),
        ("llama3_json", ("<|python_tag|>", '{"name": "look"', '{"name": "buy"')),
        ("pythonic", ("[look", "[buy")),
    ],
)
async def test_a_call_begins_as_models_write_it(parser: str, begins: tuple[str, ...]) -> None:
    model = model_of(tool_parser=parser)
    server = make_server(model=model)
    buy = {"type": "function", "function": {"name": "buy"}}
    async with server.client:
        await server.ok(CHAT, **ASKED, tools=[LOOK, buy])
        assert server.backend.last.params.exits == spelt(model, *begins)
    model.grammar_trial.close()


async def test_each_of_which_takes_time() -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)]
    model = replace(model_of(tool_parser="pythonic"), max_model_len=1 << 20)
    server = make_server(model=model)
    async with server.client:
        response = await server.post(CHAT, **ASKED, tools=tools)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"


async def test_a_message_to_a_function_of_gpt_oss_leads_out() -> None:
    server = make_server(model=harmony_model())
    role = "<|start|>assistant"
    to = ("<|channel|>commentary to=functions", " to=functions")
    assert TO_LOOK.startswith(to[0])

    def told(exits: tuple[Tokens, ...]) -> list[str]:
        return [tokenizer().decode(tokens) for tokens in exits]

    async with server.client:
        for more, before in (({}, ""), ({"add_generation_prompt": False}, role)):
            await server.ok(CHAT, **ASKED, **more, tools=[LOOK])
            params = server.backend.last.params
            assert params.reasoning is not None
            assert told(params.exits) == [before + one for one in to]
            assert told(params.reasoning.exits) == [role + one for one in to]
            await server.ok(CHAT, **ASKED, **more)
            params = server.backend.last.params
            assert params.reasoning is not None
            assert (params.exits, params.reasoning.exits) == ((), ())
    server.model.grammar_trial.close()
