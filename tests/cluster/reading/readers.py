"""Readers by name, what they made of text, and what models write."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from cluster.openai.reading.forced import ArrayReader, NamedReader
from cluster.openai.reading.formats import REASONING_FORMATS
from cluster.openai.reading.gemma import FUNCTION_GEMMA, GEMMA4, GemmaReader
from cluster.openai.reading.granite import GraniteReader
from cluster.openai.reading.harmony import Harmony, HarmonyReader
from cluster.openai.reading.harmony_messages import HarmonyMessages, Message
from cluster.openai.reading.hermes import HermesReader
from cluster.openai.reading.hunyuan import HunyuanReader
from cluster.openai.reading.llama3 import Llama3Reader
from cluster.openai.reading.mistral import MistralReader
from cluster.openai.reading.nemotron import NemotronReader
from cluster.openai.reading.olmo3 import Olmo3Reader
from cluster.openai.reading.parts import (
    CallArguments,
    CallStart,
    Content,
    PlainReader,
    Reader,
    Reasoning,
)
from cluster.openai.reading.phi4_mini import Phi4MiniReader
from cluster.openai.reading.pythonic import PythonicReader
from cluster.openai.reading.reasoning import Marks, ReasoningReader
from cluster.openai.reading.sections import DEEPSEEK_V3, KIMI_K2, SectionReader
from cluster.openai.reading.tagged import (
    GLM45,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    TaggedReader,
)

Read = tuple[str, str, list[tuple[str, str]]]
THINK = Marks("<think>", "</think>")


TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
TOOLS = {"f": {"properties": {kind: {"type": kind} for kind in TYPES}}, "g": None}


def llama() -> Reader:
    return Llama3Reader(["f", "g"])


def thinking(content: Callable[[], Reader], *, is_open: bool = False) -> Callable[[], Reader]:
    return lambda: ReasoningReader(THINK, content(), is_open=is_open)


def harmony(
    content: Callable[[], Reader] = PlainReader,
    *,
    tools: Sequence[str] | None = ("f", "g"),
    begun: str | None = None,
    of: Harmony | None = None,
) -> Callable[[], Reader]:
    message = None if begun is None else Message(channel=begun)
    return lambda: HarmonyReader(of or Harmony(), content(), tools, message)


READERS: dict[str, Callable[[], Reader]] = {
    "array": ArrayReader,
    "deepseek": lambda: SectionReader(DEEPSEEK_V3),
    "function gemma": lambda: GemmaReader(FUNCTION_GEMMA, TOOLS),
    "gemma": lambda: GemmaReader(GEMMA4, TOOLS),
    "glm": lambda: TaggedReader(GLM45, TOOLS),
    "granite": GraniteReader,
    "harmony": harmony(),
    "harmony analysis": harmony(begun="analysis"),
    "harmony array": harmony(ArrayReader, tools=None),
    "harmony final": harmony(begun="final"),
    "harmony hermes": harmony(HermesReader, of=Harmony(has_calls=False)),
    "harmony named": harmony(lambda: NamedReader("f"), tools=None),
    "harmony of calls": harmony(of=Harmony(has_reasoning=False)),
    "harmony without tools": harmony(tools=None),
    "hermes": HermesReader,
    "hunyuan": HunyuanReader,
    "kimi": lambda: SectionReader(KIMI_K2),
    "llama": llama,
    "minimax": lambda: TaggedReader(MINIMAX_M2, TOOLS),
    "mistral": MistralReader,
    "nemotron": NemotronReader,
    "olmo": Olmo3Reader,
    "phi": Phi4MiniReader,
    "pythonic": lambda: PythonicReader(["f", "g", "a.b"]),
    "qwen": lambda: TaggedReader(QWEN3_CODER, TOOLS),
    "seed": lambda: TaggedReader(SEED_OSS, TOOLS),
    "thinking": thinking(PlainReader),
    "thinking in a channel": lambda: ReasoningReader(
        REASONING_FORMATS["gemma4"], GemmaReader(GEMMA4, TOOLS), is_open=False
    ),
    "thinking already": thinking(HermesReader, is_open=True),
}


def read(reader: Reader, pieces: Sequence[str]) -> Read:
    """Reasoning, content, and calls as name and arguments."""
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    for before, part in pairwise([None, *parts]):
        match part:
            case Reasoning(text):
                assert text
                reasoning += text
            case Content(text):
                assert text
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert text
                assert index == len(calls) - 1, "arguments belong to the call that is open"
                assert isinstance(before, CallStart | CallArguments), "which nothing interrupts"
                calls[index] = (calls[index][0], calls[index][1] + text)
    return reasoning, content, calls


def of_messages(spans: Sequence[tuple[str, Message | None]]) -> list[tuple[str, Message | None]]:
    """With what is told in pieces put together."""
    whole: list[tuple[str, Message | None]] = []
    for text, message in spans:
        if whole and text and message == whole[-1][1]:
            whole[-1] = whole[-1][0] + text, message
        else:
            whole.append((text, message))
    return whole


def spans_of(pieces: Sequence[str]) -> list[tuple[str, Message | None]]:
    messages = HarmonyMessages(None)
    spans = [span for piece in pieces for span in messages.push(piece)]
    return [*spans, *messages.finish()]


def objects(*calls: tuple[str, Any], key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}) for name, arguments in calls]


CALL, OTHER = objects(("f", {"a": [1, {"b": '}"\\'}]}), ("g", {}))
WHOLE = [("f", '{"a": [1, {"b": "}\\"\\\\"}]}'), ("g", "{}")]
BACKWARDS = '{"arguments": {"x": "{"}, "name": "f"}'
QWEN = """<tool_call>
<function=f>
<parameter=string>
if a < 1:
    print("</param")

</parameter>
<parameter=integer>
12
</parameter>
</function>
</tool_call>"""
UNMARKED = QWEN.removeprefix("<tool_call>\n")
QWEN_READ = ("f", '{"string": "if a < 1:\\n    print(\\"</param\\")\\n", "integer": 12}')
SEED = """<seed:tool_call>
<function=f>
<parameter=string>
a
</parameter>
<parameter=array>[1]</parameter>
</function>
</seed:tool_call>"""
SEED_READ = ("f", '{"string": "\\na\\n", "array": [1]}')
MINIMAX = """<minimax:tool_call>
<invoke name="f">
<parameter name="string">a\"</parameter>
<parameter name="null">null</parameter>
</invoke>
<invoke name="g">
</invoke>
</minimax:tool_call>"""
MINIMAX_READ = [("f", '{"string": "a\\"", "null": null}'), ("g", "{}")]
F1 = [("f", '{"a": 1}')]
GLM = """<tool_call>f
<arg_key>string</arg_key>
<arg_value>12
</arg_value>
<arg_key>object</arg_key>
<arg_value>{"ü": [1, {"b": "</arg_key>"}]}</arg_value>
</tool_call>"""
GLM_READ = ("f", '{"string": "12\\n", "object": {"ü": [1, {"b": "</arg_key>"}]}}')
GEMMA = (
    '<|tool_call>call:f{string:<|"|>a "b" {c}, <tool_call|>\n<|"|>,integer:12,boolean:true,'
    'null:None,array:[1,<|"|>x<|"|>,[],{a:<|"|>]<|"|>,b c:-1.5}],object:{}}<tool_call|>'
)
GEMMA_READ = (
    "f",
    '{"string": "a \\"b\\" {c}, <tool_call|>\\n", "integer": 12, "boolean": true, "null": null, '
    '"array": [1, "x", [], {"a": "]", "b c": -1.5}], "object": {}}',
)
FUNCTION_GEMMA_SAYS = (
    "<start_function_call>\ncall:f{string:<escape>a {b}, <end_function_call><escape>, integer:12,"
    "array:[1,<escape>x<escape>],object:{a:None}}\n<end_function_call>"
)
FUNCTION_GEMMA_READ = (
    "f",
    '{"string": "a {b}, <end_function_call>", "integer": 12, "array": [1, "x"], '
    '"object": {"a": null}}',
)
OLMO = """<function_calls>
f(string='it\\'s </function_calls>', integer=1, boolean=true, null=None)
a.b(x=[1, {"ü": null}],
    y="<function_calls>")
</function_calls>"""
OLMO_READ = [
    ("f", '{"string": "it\'s </function_calls>", "integer": 1, "boolean": true, "null": null}'),
    ("a.b", '{"x": [1, {"ü": null}], "y": "<function_calls>"}'),
]
DEEPSEEK = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
FENCED = """<｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"a": "```<｜tool▁call▁end｜>"}
```<｜tool▁call▁end｜>"""
FENCED_READ = ("f", '{"a": "```<｜tool▁call▁end｜>"}')
SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|>\n<|tool_call_begin|>a.b:1<|tool_call_argument_begin|>\n{}\n'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
ANALYSIS = "<|channel|>analysis<|message|>Hm."
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
