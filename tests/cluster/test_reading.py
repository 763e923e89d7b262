"""From text to reasoning, content and tool calls: by example, and however the text is cut."""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.openai.reading.forced import ArrayReader, NamedReader
from cluster.openai.reading.granite import GraniteReader
from cluster.openai.reading.harmony import Harmony, HarmonyReader, HarmonyTokens
from cluster.openai.reading.harmony_messages import MARKS, HarmonyMessages, Message
from cluster.openai.reading.hermes import HermesReader
from cluster.openai.reading.llama3 import Llama3Reader
from cluster.openai.reading.mistral import MistralReader
from cluster.openai.reading.parts import (
    CallArguments,
    CallStart,
    Content,
    PlainReader,
    Reader,
    Reasoning,
)
from cluster.openai.reading.pythonic import PythonicReader
from cluster.openai.reading.reasoning import Marks, ReasoningReader
from cluster.openai.reading.reasoning_tokens import ReasoningTokens
from cluster.openai.reading.sections import DEEPSEEK_V3, KIMI_K2, SectionReader
from cluster.openai.reading.tagged import GLM45, QWEN3_CODER, TaggedReader
from engine.text.pieces import Pieces, PieceTable

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
    "kimi": lambda: SectionReader(KIMI_K2),
    "llama": llama,
    "mistral": MistralReader,
    "pythonic": lambda: PythonicReader(["f", "g", "a.b"]),
    "qwen": lambda: TaggedReader(QWEN3_CODER, TOOLS),
    "thinking": thinking(PlainReader),
    "thinking already": thinking(HermesReader, is_open=True),
}


def read(reader: Reader, pieces: Sequence[str]) -> Read:
    """Reasoning, content, and calls as name and arguments."""
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    for part in parts:
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
                calls[index] = (calls[index][0], calls[index][1] + text)
    return reasoning, content, calls


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
F1 = [("f", '{"a": 1}')]
GLM = """<tool_call>f
<arg_key>string</arg_key>
<arg_value>12
</arg_value>
<arg_key>object</arg_key>
<arg_value>{"ü": [1, {"b": "</arg_key>"}]}</arg_value>
</tool_call>"""
GLM_READ = ("f", '{"string": "12\\n", "object": {"ü": [1, {"b": "</arg_key>"}]}}')
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
CASES: list[tuple[str, str, Read]] = [
    ("deepseek", f"I look.\n{SECTION}{DEEPSEEK}{SECTION_END}", ("", "I look.", [("f", "{}")])),
    (
        "deepseek",
        f"{SECTION}{FENCED}\n{DEEPSEEK}{SECTION_END}\n",
        ("", "", [FENCED_READ, ("f", "{}")]),
    ),
    ("deepseek", f"{FENCED.removesuffix('<｜tool▁call▁end｜>')}", ("", "", [FENCED_READ])),
    ("deepseek", f"{DEEPSEEK}\n\nDone.\n{FENCED}", ("", "Done.", [("f", "{}"), FENCED_READ])),
    ("deepseek", f"Now.\n{DEEPSEEK}{SECTION_END}\nSo.", ("", "Now.\nSo.", [("f", "{}")])),
    ("deepseek", f"{DEEPSEEK}```\n{DEEPSEEK}", ("", "```", [("f", "{}")] * 2)),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}",
        ("", "", [("function", "{}")]),
    ),
    *(
        ("deepseek", text, ("", text, []))
        for text in (
            f"{SECTION} what?",
            f"{SECTION}{SECTION_END}",
            f"{SECTION}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```js\n{{}}",
            "<｜tool▁call▁begin｜>f {}",
            f"<｜tool▁call▁begin｜>{'f' * 300}<｜tool▁sep｜>{{}}",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        )
    ),
    (
        "deepseek",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1',
        ("", "", [("f", '{"a": 1')]),
    ),
    ("granite", f"<|tool_call|>[{CALL}, {OTHER}]", ("", "", WHOLE)),
    ("granite", f"I look.\n<tool_call>[{CALL}]", ("", "I look.", WHOLE[:1])),
    ("granite", "<|tool_call|> none", ("", "<|tool_call|> none", [])),
    ("kimi", f"I look. {KIMI}", ("", "I look.", [("f", '{"a": 1}'), ("a.b", "{}")])),
    ("kimi", KIMI.replace("functions.f:0", "f").partition("\n")[0], ("", "", [("f", '{"a": 1}')])),
    ("harmony", f"{ANALYSIS}<|end|>{FINAL}Hello <b>\n", ("Hm.", "Hello <b>\n", [])),
    ("harmony", f"{ANALYSIS}<|end|>{FINAL}Hello<|return|>", ("Hm.", "Hello", [])),
    ("harmony", "<|channel|>final<|message|> Hello", ("", " Hello", [])),
    ("harmony", f"{FINAL}Hello", ("", "Hello", [])),
    ("harmony", f'{ANALYSIS}<|end|><|start|>assistant{TO_F}{{"a": 1}}', ("Hm.", "", F1)),
    ("harmony", f'{TO_F}{{"a": 1}}<|call|>', ("", "", F1)),
    *(
        ("harmony", f'{ANALYSIS}<|end|>{header}<|message|>{{"a": 1}}', ("Hm.", "", F1))
        for header in (
            "<|start|>assistant<|channel|>commentary to=functions.f",
            "<|start|>assistant<|channel|>commentary to=functions.f json",
            "<|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json",
            "<|start|>assistant <|channel|> commentary  to= functions.f <|constrain|> json ",
            "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json",
            "<|start|>assistant to=functions.f<|channel|>commentary json",
            "<|start|>assistant to=f<|channel|>analysis code",
            "<|start|>assistant<|channel|>commentary to=functions.f<|channel|>commentary json",
            "\n<|start|>assistant<|channel|>commentary to=functions.f",
            "<|channel|>commentary to=functions.f",
        )
    ),
    ("harmony", " to=functions.h<|channel|>commentary<|message|>{}", ("", "", [("h", "{}")])),
    ("harmony", "<|channel|>commentary to=functions.g<|message|>", ("", "", [("g", "")])),
    ("harmony", "<|channel|>commentary to=h<|message|>{}", ("", "{}", [])),
    ("harmony", "<|channel|>commentary to=functions.<|message|>{}", ("", "{}", [])),
    ("harmony", "<|channel|>analysis to=python<|message|>1 + 1", ("1 + 1", "", [])),
    (
        "harmony",
        f"{ANALYSIS}<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant{TO_F}{{}}<|call|>",
        ("Hm.", "I look.", [("f", "{}")]),
    ),
    (
        "harmony",
        f"{ANALYSIS}<|end|><|start|>assistant{ANALYSIS}<|end|><|start|>assistant<|channel|>"
        f"commentary<|message|>I look.<|end|><|start|>assistant{ANALYSIS}<|end|>{FINAL}So.",
        ("Hm.\n\nHm.\n\nHm.", "I look.\n\nSo.", []),
    ),
    (
        "harmony",
        f"{ANALYSIS}<|end|><|start|>assistant<|channel|>analysis<|message|><|end|>{FINAL}",
        ("Hm.", "", []),
    ),
    ("harmony", "<|channel|>final <|constrain|>json<|message|>{}", ("", "{}", [])),
    ("harmony", "<|channel|><|message|>Hello", ("", "Hello", [])),
    ("harmony", "<|message|>Hello", ("", "Hello", [])),
    ("harmony", "Hello.  \n", ("", "Hello.  \n", [])),
    ("harmony", " to be or not to=be", ("", " to be or not to=be", [])),
    ("harmony", "to=f", ("", "to=f", [])),
    ("harmony", f"Hello<|end|>{FINAL}you", ("", "Hello\n\nyou", [])),
    ("harmony", " ", ("", " ", [])),
    ("harmony", "", ("", "", [])),
    *(
        ("harmony", f"{ANALYSIS}<|end|>{FINAL}"[:cut], ("Hm."[: max(0, cut - 30)], "", []))
        for cut in (*range(11, 34), *range(40, 85))  # but within the mark of the end
    ),
    ("harmony", f"{FINAL}The end is <|end|>, or <|en", ("", "The end is <|end|>, or <|en", [])),
    ("harmony", f"{FINAL}<|end|><|end|>\n<|return|>", ("", "", [])),
    (
        "harmony",
        f"{FINAL}a<|end|><|start|>is no message<|end|>{FINAL}b",
        ("", "a<|end|><|start|>is no message\n\nb", []),
    ),
    (
        "harmony",
        f"<|channel|>final and no mark {'x' * 600}",
        ("", f" and no mark {'x' * 600}", []),
    ),
    ("harmony", f"<|channel|>commentary? <|end|>{FINAL}Hello", ("", "Hello", [])),
    ("harmony", "<|channel|>analysis\n\nHm. So<|end|>", ("\n\nHm. So", "", [])),
    ("harmony", "<|channel|>I write what I want", ("", "<|channel|>I write what I want", [])),
    ("harmony", f"<|channel|>finally<|message|>a<|end|>{FINAL}b", ("", "a\n\nb", [])),
    ("harmony", "<|channel|>final to=functions.f<|message|>Hello", ("", "Hello", [])),
    (
        "harmony",
        '<|channel|>commentary to=functions.f<|channel|>commentary json json {"a": 1}',
        ("", "", [("f", ' json json {"a": 1}')]),
    ),
    (
        "harmony",
        f"<|channel|>{'x' * 600}<|message|>a",
        ("", f"<|channel|>{'x' * 600}<|message|>a", []),
    ),
    ("harmony analysis", f"Hm.<|end|>{FINAL}So.", ("Hm.", "So.", [])),
    ("harmony analysis", "to=f", ("to=f", "", [])),
    ("harmony final", "So.", ("", "So.", [])),
    ("harmony final", f"So.<|end|><|start|>assistant{ANALYSIS}", ("Hm.", "So.", [])),
    ("harmony array", f"{ANALYSIS}<|end|>{FINAL}[{CALL}]", ("Hm.", "", WHOLE[:1])),
    ("harmony array", f"[{CALL}]", ("", "", WHOLE[:1])),
    ("harmony named", f'{ANALYSIS}<|end|>{FINAL}{{"a": 1}}', ("Hm.", "", F1)),
    ("harmony hermes", f"{FINAL}<tool_call>{CALL}</tool_call>", ("", "", WHOLE[:1])),
    ("harmony of calls", f"{ANALYSIS}<|end|>{FINAL}So.", ("", "Hm.\n\nSo.", [])),
    ("harmony without tools", f"{TO_F}{{}}", ("", "{}", [])),
    ("hermes", "no call  \n", ("", "no call  \n", [])),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ("", "", WHOLE[:1])),
    (
        "hermes",
        f"I look.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}</tool_call>\n ",
        ("", "I look.", WHOLE),
    ),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n\nDone. ", ("", "Done.", WHOLE[:1])),
    (
        "hermes",
        f"I look.\n<tool_call>{CALL}</tool_call>\n\nDone.\n<tool_call>{OTHER}</tool_call>\nSo.",
        ("", "I look.\n\nDone.\nSo.", WHOLE),
    ),
    (
        "hermes",
        f"<tool_call>{CALL}</tool_call>\n<tool_call>what?",
        ("", "<tool_call>what?", WHOLE[:1]),
    ),
    ("hermes", f"<tool_call>{BACKWARDS}", ("", "", [("f", '{"x": "{"}')])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}', ("", "", [("f", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}',
        ("", "", [("f", '{"a": 1}')]),
    ),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "parameters": {"a": "ü"}}}',
        ("", "", [("f", '{"a": "ü"}')]),
    ),
    ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>", ("", "", WHOLE[:1])),
    (
        "hermes",
        f"<tool_call>\n{CALL}}}\n</tool_call>\n<tool_call>{OTHER}}} }}",
        ("", "", WHOLE),
    ),
    ("hermes", f"<tool_call>{CALL}}}</tool", ("", "", WHOLE[:1])),
    ("hermes", f"<tool_call>{CALL}\n}} is a brace", ("", "} is a brace", WHOLE[:1])),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"b', ("", "", [("f", '{"a":"b')])),
    ("hermes", '<tool_call>{"name": "f', ("", '<tool_call>{"name": "f', [])),
    ("hermes", "a <tool_call> b", ("", "a <tool_call> b", [])),
    ("hermes", "a <tool_cal", ("", "a <tool_cal", [])),
    (
        "hermes",
        '<tool_call>{"nme": 1}</tool_call>',
        ("", '<tool_call>{"nme": 1}</tool_call>', []),
    ),
    ("llama", f"{objects(('f', {'a': 1}), key='parameters')[0]}", ("", "", [("f", '{"a": 1}')])),
    ("llama", f"\n {CALL};\n{OTHER} ", ("", "", WHOLE)),
    ("llama", f"<|python_tag|>{CALL}; {OTHER}", ("", "", WHOLE)),
    ("llama", '{"name": "h", "parameters": {}}', ("", '{"name": "h", "parameters": {}}', [])),
    ("llama", '<|python_tag|>{"name": "h", "parameters": {}}', ("", "", [("h", "{}")])),
    ("llama", f"Here: {CALL}", ("", f"Here: {CALL}", [])),
    ("llama", '{"answer": [1, 2]} and more', ("", '{"answer": [1, 2]} and more', [])),
    ("llama", f"{CALL}\n\nDone.", ("", "Done.", WHOLE[:1])),
    ("llama", "  ", ("", "  ", [])),
    (
        "llama",
        '<|python_tag|>brave_search.call(query="a, b", num=2)',
        ("", "", [("brave_search", '{"query": "a, b", "num": 2}')]),
    ),
    ("llama", "<|python_tag|>print('x')\n", ("", "<|python_tag|>print('x')\n", [])),
    ("llama", "<|python_tag|>f.call(1)", ("", "<|python_tag|>f.call(1)", [])),
    ("llama", "<|python_tag|>f.call()(a=1)", ("", "<|python_tag|>f.call()(a=1)", [])),
    ("qwen", QWEN, ("", "", [QWEN_READ])),
    ("qwen", f"I look.\n{QWEN}\n{QWEN}\n", ("", "I look.", [QWEN_READ] * 2)),
    (
        "qwen",
        "<tool_call><function=g></function></tool_call>\nDone. ",
        ("", "Done.", [("g", "{}")]),
    ),
    (
        "qwen",
        "<tool_call><function=f><parameter=boolean>\nTrue\n</parameter></tool_call> So",
        ("", "So", [("f", '{"boolean": true}')]),
    ),
    (
        "qwen",
        "<tool_call><function=f><parameter=array>['a']</parameter>\nno more\n</function>",
        ("", "no more\n</function>", [("f", '{"array": ["a"]}')]),
    ),
    (
        "qwen",
        "<tool_call><function=h><parameter=a>\n[1\n</parameter><parameter=b>1</parameter></function>",
        ("", "", [("h", '{"a": "[1", "b": 1}')]),
    ),
    (
        "qwen",
        "<tool_call><function=f><parameter=string>\n\n</parameter></function>",
        ("", "", [("f", '{"string": ""}')]),
    ),
    ("qwen", QWEN[: QWEN.index("1:")], ("", "", [("f", '{"string": "if a < ')])),
    ("qwen", QWEN[: QWEN.index("\n12")], ("", "", [("f", QWEN_READ[1].rpartition(",")[0])])),
    ("qwen", "<tool_call>\n<function=f>\n", ("", "<tool_call>\n<function=f>\n", [])),
    ("qwen", "<tool_call><function=f>what?", ("", "<tool_call><function=f>what?", [])),
    ("qwen", "<tool_call><function=f\n>x", ("", "<tool_call><function=f\n>x", [])),
    ("qwen", f"a <tool_call>b {QWEN}", ("", "a <tool_call>b", [QWEN_READ])),
    ("qwen", f"<tool_call>{CALL}</tool_call>", ("", f"<tool_call>{CALL}</tool_call>", [])),
    (
        "qwen",
        f"I look.\n{UNMARKED}\n{QWEN}\n\n{UNMARKED}",
        ("", "I look.", [QWEN_READ] * 3),
    ),
    ("qwen", f"{UNMARKED}\nDone.", ("", "Done.", [QWEN_READ])),
    ("qwen", " <function=g></function> So", ("", "So", [("g", "{}")])),
    (
        "qwen",
        "a <function=h><parameter=b> <function=g></function>",
        ("", "a <function=h><parameter=b>", [("g", "{}")]),
    ),
    ("qwen", "a <function=g> <tool_call>", ("", "a <function=g> <tool_call>", [])),
    ("qwen", "a <function=g>", ("", "a <function=g>", [])),
    ("qwen", "a <functio", ("", "a <functio", [])),
    ("qwen", f"a <function={'g' * 300}>", ("", f"a <function={'g' * 300}>", [])),
    (
        "qwen",
        f"<tool_call><function={'f' * 300}></function>",
        ("", f"<tool_call><function={'f' * 300}></function>", []),
    ),
    (
        "qwen",
        f"<tool_call><function=g><parameter={'k' * 300}>1</parameter>",
        ("", f"<parameter={'k' * 300}>1</parameter>", [("g", "{}")]),
    ),
    ("glm", GLM, ("", "", [GLM_READ])),
    ("glm", f"I look.\n{GLM}\n{GLM} Well", ("", "I look. Well", [GLM_READ] * 2)),
    ("glm", "<tool_call>g\n</tool_call>\n", ("", "", [("g", "{}")])),
    (
        "glm",
        "<tool_call>f<arg_key>null</arg_key><arg_value>null</arg_value> so </tool_call>",
        ("", "so </tool_call>", [("f", '{"null": null}')]),
    ),
    ("glm", GLM[:-12], ("", "", [("f", GLM_READ[1][:-1])])),
    ("glm", "<tool_call>g", ("", "<tool_call>g", [])),
    ("glm", "<tool_call>not a name<arg_key>", ("", "<tool_call>not a name<arg_key>", [])),
    ("glm", f"<tool_call>{CALL}</tool_call>", ("", f"<tool_call>{CALL}</tool_call>", [])),
    ("mistral", f"[TOOL_CALLS][{CALL}, {OTHER}]", ("", "", WHOLE)),
    ("mistral", f"So:\n[TOOL_CALLS] [{CALL}]", ("", "So:", WHOLE[:1])),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}',
        ("", "", [("f", '{"a": 1}'), WHOLE[1]]),
    ),
    ("mistral", "[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}", ("", "", WHOLE[1:])),
    ("mistral", f"[TOOL_CALLS][{CALL}]\n\nDone.", ("", "Done.", WHOLE[:1])),
    ("mistral", "[TOOL_CALLS] what?", ("", "[TOOL_CALLS] what?", [])),
    ("mistral", f"[TOOL_CALLS]{' ' * 300}g {{}}", ("", "", WHOLE[1:])),
    ("mistral", f"a [TOOL_CALLS][ , [TOOL_CALLS][{OTHER}", ("", "a [TOOL_CALLS][ ,", WHOLE[1:])),
    ("mistral", "[TOOL_CALLS]not a name {", ("", "[TOOL_CALLS]not a name {", [])),
    ("mistral", "[TOOL_CALLS][1]", ("", "[TOOL_CALLS][1]", [])),
    ("mistral", "[TOOL_CALLS][]", ("", "", [])),
    ("pythonic", "[g()]", ("", "", [("g", "{}")])),
    ("pythonic", " [g()] ", ("", "", [("g", "{}")])),
    (
        "pythonic",
        '\n[f(a=1, b=\'x]", ü\', c=[-1.5, {\'d\': None}, (True,)]), g(), a.b(q="""")""")]\n',
        (
            "",
            "",
            [
                ("f", '{"a": 1, "b": "x]\\", ü", "c": [-1.5, {"d": null}, [true]]}'),
                ("g", "{}"),
                ("a.b", '{"q": "\\")"}'),
            ],
        ),
    ),
    (
        "pythonic",
        "[ f (a=true, b={'c': null},), ]",
        ("", "", [("f", '{"a": true, "b": {"c": null}}')]),
    ),
    *(
        ("pythonic", text, ("", text, []))
        for text in (
            "Here: [g()]",
            "[g()] Done.",
            "[g()",
            "[f(a='",
            "[f(a=1), h()]",
            "[h(a=1), f()]",
            "[f(1)]",
            "[f(**{'a': 1})]",
            "[f(a=__import__('os').getcwd())]",
            "[f(a=b)]",
            "[f(a={1})]",
            "[f(a=1e999)]",
            "[f(a=2**9)]",
            "[f()()]",
            "[g(), 1]",
            "[f(a=\0)]",
            f"[f(a={'[' * 1000})]",
            "[1, 2]",
            "[f](x)",
            "[" + "f" * 300 + "()]",
            " " * 300 + "[g()]",
            "[]",
            "[",
            " ",
        )
    ),
    ("thinking", "<think>\nWell.\n\nSo \n</think>\n\nYes. ", ("Well.\n\nSo", "Yes. ", [])),
    ("thinking", "\n<think></think>", ("", "", [])),
    ("thinking", "<think>on and on ", ("on and on", "", [])),
    ("thinking", " No <think> at first", ("", " No <think> at first", [])),
    ("thinking already", f"Well.</think>\n<tool_call>{CALL}", ("Well.", "", WHOLE[:1])),
    ("thinking already", "<think>Well.</think>a</think>", ("Well.", "a</think>", [])),
    ("thinking already", " <thin", ("<thin", "", [])),
]


@pytest.mark.parametrize(("reader", "text", "expected"), CASES)
def test_what_is_read(reader: str, text: str, expected: Read) -> None:
    assert read(READERS[reader](), [text]) == expected
    assert read(READERS[reader](), list(text)) == expected
    for cut in range(len(text)):
        assert read(READERS[reader](), [text[:cut], text[cut:]]) == expected


fragments = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"]
    + ["<|tool_call|>"]
    + ["<think>", "</think>", "<tool_", "[TOOL", "f", "g.call(a=1)", "{", "}", "[", "]", ";", ","]
    + ['{"name": "f", "arguments": {', '"a": "b\\"', '"', "\\", " ", "\n", CALL, OTHER, BACKWARDS]
    + ['{"name": "f", "parameters": "', '"name"', ":", "{}", "word"]
    + [
        UNMARKED,
        "<function=h>",
        "<function=f>",
        "<parameter=string>",
        "<parameter=k>\n",
        "</parameter>",
        "</function>",
        QWEN,
    ]
    + ["[f(a=", "'x')", "g()]", '"""']
    + [SECTION, SECTION_END, DEEPSEEK, FENCED, "```json\n", "```"]
    + ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>function"]
    + [KIMI, "<|tool_call_begin|>functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_"]
    + ["<arg_key>string", "</arg_key>", "<arg_value>", "</arg_value>", "<parameter=", GLM]
    + [*MARKS, "assistant", " to=functions.f", "to=g", "analysis", "final", "commentary", " json"]
    + [f"<|end|>{FINAL}", f"<|end|><|start|>assistant{ANALYSIS}", TO_F, "<|end", "<|start|"]
    + [" " * 40, "\n" * 300, "\u3000" * 1500]
)
texts = st.lists(st.one_of(fragments, st.text(max_size=3)), max_size=12).map("".join)


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=100)
@given(text=texts, data=st.data())
def test_it_does_not_matter_how_text_is_cut(reader: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    whole = read(READERS[reader](), [text])
    assert read(READERS[reader](), pieces) == whole
    assert read(READERS[reader](), list(text)) == whole


def between_marks(text: str, *, is_open: bool) -> tuple[int, int]:
    """Where the reasoning begins and ends."""
    said = text.lstrip()
    if said.startswith(THINK.start):
        begin = len(text) - len(said) + len(THINK.start)
    elif is_open:
        begin = 0
    else:
        return 0, 0
    end = text.find(THINK.end, begin)
    return begin, len(text) if end < 0 else end


@settings(max_examples=300)
@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "</", "a", " ", "b<"])),
    per_push=st.integers(1, 9),
    is_open=st.booleans(),
)
@example(pieces=[" ", "<think>", " ", "a</think", "><"], per_push=1, is_open=False)
@example(pieces=["a", "<", "<", "</thi"], per_push=1, is_open=True)
def test_tokens_of_reasoning_are_those_with_text_between_the_marks(
    pieces: list[str], per_push: int, is_open: bool
) -> None:
    table = PieceTable(None, str.encode, frozenset())
    table.update(enumerate(map(str.encode, pieces)))
    count = ReasoningTokens(THINK, Pieces(None, frozenset(), table), is_open=is_open)
    for start in range(0, len(pieces), per_push):
        count.push(range(len(pieces))[start : start + per_push])
    count.finish()
    text = "".join(pieces)
    begin, end = between_marks(text, is_open=is_open)
    begins = [*accumulate(map(len, pieces), initial=0)]
    of_it = [max(begin, a) < min(end, b) for a, b in pairwise(begins)]
    assert count.num_tokens == sum(of_it)
    assert read(thinking(PlainReader, is_open=is_open)(), [text])[0] == text[begin:end].strip()


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


@given(text=texts)
@example(text="<|channel|>final<|message|>\u3000<|end|>\x85<|start|>")
def test_nothing_of_messages_is_lost_and_bytes_are_cut_where_text_is(text: str) -> None:
    spans = spans_of([text])
    assert "".join(span[0] for span in spans) == text
    byte_spans = spans_of(list(text.encode().decode("latin-1")))
    as_text = [
        (span.encode("latin-1").decode(), message) for span, message in of_messages(byte_spans)
    ]
    assert as_text == of_messages(spans)


@settings(max_examples=300)
@given(
    pieces=st.lists(
        st.sampled_from(
            [*MARKS, "analysis", "final", "assistant", "a", " ", "<|", "end|>b", "ü<|message|>c"]
            + ["|>", "sis<|message|>", f"<|end|><|start|>assistant{ANALYSIS}"]
        )
    ),
    per_push=st.integers(1, 9),
)
@example(pieces=["<|channel|>", "analysis", "<|message|>", " ", "a<", "|end|>"], per_push=1)
def test_tokens_of_reasoning_are_those_with_text_of_analysis(
    pieces: list[str], per_push: int
) -> None:
    table = PieceTable(None, str.encode, frozenset())
    table.update(enumerate(map(str.encode, pieces)))
    count = HarmonyTokens(Harmony(), Pieces(None, frozenset(), table), None, None)
    for start in range(0, len(pieces), per_push):
        count.push(range(len(pieces))[start : start + per_push])
    count.finish()
    expected: set[int] = set()
    token_of = [i for i, piece in enumerate(pieces) for _ in piece]
    at = 0
    for text, message in spans_of(["".join(pieces)]):
        if message is not None and message.channel == "analysis":
            expected |= set(token_of[at : at + len(text)])
        at += len(text)
    assert count.num_tokens == len(expected)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=60)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(max_size=4), json_values)),
        min_size=1,
        max_size=3,
    ),
    compact=st.booleans(),
    ascii_only=st.booleans(),
)
@example(calls=[("f", {"</tool_call>": "]}"})], compact=True, ascii_only=False)
def test_calls_come_out_as_they_went_in(
    calls: list[tuple[str, dict[str, Any]]], compact: bool, ascii_only: bool
) -> None:
    def spell(value: Any) -> str:
        separators = (",", ":") if compact else None
        return json.dumps(value, separators=separators, ensure_ascii=ascii_only)

    plain = [spell({"name": name, "arguments": arguments}) for name, arguments in calls]
    written = {
        "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in plain),
        "llama": ";".join(
            spell({"name": name, "parameters": arguments}) for name, arguments in calls
        ),
        "mistral": f"[TOOL_CALLS][{', '.join(plain)}]",
        "granite": f"<|tool_call|>[{', '.join(plain)}]",
        "deepseek": "\n".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{spell(arguments)}<｜tool▁call▁end｜>"
            for name, arguments in calls
        ),
    }
    for reader, text in written.items():
        reasoning, content, found = read(READERS[reader](), [text])
        assert (reasoning, content) == ("", "")
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def printed(value: Any) -> str:
    """As Qwen's template prints a value."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


@settings(max_examples=60)
@given(
    arguments=st.dictionaries(
        st.text("ab ü.", min_size=1), json_values | st.floats(allow_nan=False, allow_infinity=False)
    )
)
@example(arguments={"a": "\n", "b": "1", " ": "null", "ü": "</parameter ></arg_value"})
def test_arguments_without_json_come_out_as_they_went_in(arguments: dict[str, Any]) -> None:
    kinds = dict(zip((str, int, float, bool, type(None), list, dict), TYPES, strict=True))
    types = {name: {"type": kinds[type(value)]} for name, value in arguments.items()}
    tools = {"f": {"type": "object", "properties": types}}
    qwen = "".join(
        f"<parameter={name}>\n{printed(value)}\n</parameter>\n" for name, value in arguments.items()
    )
    glm = "".join(
        f"<arg_key>{name}</arg_key>\n"
        f"<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
        for name, value in arguments.items()
    )
    for tags, text in (
        (QWEN3_CODER, f"<tool_call>\n<function=f>\n{qwen}</function>\n</tool_call>"),
        (GLM45, f"<tool_call>f\n{glm}</tool_call>"),
    ):
        reasoning, content, found = read(TaggedReader(tags, tools), [text])
        assert (reasoning, content) == ("", "")
        assert [(name, json.loads(written)) for name, written in found] == [("f", arguments)]


calls_by_words = st.lists(
    st.tuples(
        st.sampled_from("fg"), st.dictionaries(st.sampled_from(["a", "b_2", "json"]), json_values)
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60)
@given(calls=calls_by_words)
def test_calls_in_python_come_out_as_they_went_in(calls: list[tuple[str, dict[str, Any]]]) -> None:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    reasoning, content, found = read(READERS["pythonic"](), [f"[{', '.join(written)}]"])
    assert (reasoning, content) == ("", "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_nothing_waits_longer_than_it_must() -> None:
    """Content comes at once but for what may be a mark, arguments as they are written."""
    reader = HermesReader()
    assert reader.push("Hello") == [Content("Hello")]
    assert reader.push(" there <") == [Content(" there")]
    assert reader.push("3") == [Content(" <3")]
    assert reader.push('<tool_call>{"name": "f", "arguments": {"a"') == [
        CallStart(0, "f"),
        CallArguments(0, '{"a"'),
    ]
    assert reader.push(": 1") == [CallArguments(0, ": 1")]
    reader = TaggedReader(QWEN3_CODER, TOOLS)
    assert reader.push("<tool_call><function=f><parameter=string>\na\n") == [
        CallStart(0, "f"),
        CallArguments(0, '{"string": "a'),
    ]
    assert reader.push("b</") == [CallArguments(0, "\\nb")]


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        ("qwen", f"<tool_call><function={'f' * 300}"),
        ("qwen", "<tool_call><function=f>what"),
        ("glm", f"<tool_call>{'f' * 300}"),
        ("glm", "<tool_call>not a name"),
        ("pythonic", f"[{'f' * 300}"),
        ("pythonic", "[h("),
    ],
)
def test_what_cannot_become_a_call_waits_for_nothing(reader: str, text: str) -> None:
    parts = READERS[reader]().push(text)
    assert "".join(part.text for part in parts if isinstance(part, Content)) == text


class Counted(str):
    """Text that counts how much of it and of what comes of it is copied or gone through."""

    __slots__ = ()
    num_chars = 0

    def __add__(self, other: str) -> "Counted":
        return self._made(str.__add__(self, other))

    def __radd__(self, other: str) -> "Counted":
        return self._made(other + str(self))

    def __getitem__(self, where: Any) -> "Counted":
        return self._made(str.__getitem__(self, where))

    def lstrip(self, chars: str | None = None) -> "Counted":
        return self._made(str.lstrip(self, chars), len(self))

    def rstrip(self, chars: str | None = None) -> "Counted":
        return self._made(str.rstrip(self, chars), len(self))

    def find(self, *what: Any) -> int:
        Counted.num_chars += len(self)
        return str.find(self, *what)

    @staticmethod
    def _made(text: str, num_chars: int = 0) -> "Counted":
        Counted.num_chars += max(len(text), num_chars)
        return Counted(text)


def work(make: Callable[[], Reader], start: str, pieces: Sequence[str]) -> int:
    reader = make()
    reader.push(start)
    Counted.num_chars = 0
    for piece in pieces:
        reader.push(Counted(piece))
    reader.finish()
    return Counted.num_chars


@pytest.mark.parametrize(
    ("reader", "start", "piece"),
    [
        *((reader, "x", " ") for reader in READERS),
        *((reader, "", "\n") for reader in READERS),
        ("array", "[", " ,"),
        ("deepseek", SECTION, " "),
        ("deepseek", "<｜tool▁call▁begin｜>", " "),
        ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "', "x"),
        ("deepseek", DEEPSEEK, " "),
        ("kimi", KIMI, " "),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", " "),
        ("harmony", "<|channel|>", " "),
        ("harmony", ANALYSIS, " "),
        ("harmony", TO_F, "x"),
        ("harmony", f"{ANALYSIS}<|end|>", " "),
        ("harmony", f"{ANALYSIS}<|end|>", "<|end|>"),
        ("harmony", ANALYSIS, "<|end|><|start|>"),
        ("harmony", f"{ANALYSIS}<|end|><|start|>", " "),
        ("hermes", "<tool_call>", " "),
        ("hermes", "<tool_call>{", " "),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x"),
        ("hermes", f"<tool_call>{CALL}", " }"),
        ("hermes", f"<tool_call>{CALL}</tool_call>", " "),
        ("llama", "<|python_tag|>", " "),
        ("llama", "<|python_tag|>f", "("),
        ("llama", CALL, "; "),
        ("mistral", "[TOOL_CALLS]", " "),
        ("mistral", "[TOOL_CALLS][", " "),
        ("mistral", f"[TOOL_CALLS][{CALL}", " ,"),
        ("qwen", "<tool_call><function=f><parameter=string>", "x"),
        ("qwen", "<tool_call><function=f><parameter=string>1</parameter>", " "),
        ("qwen", f"{QWEN}", " "),
        ("thinking", "<think>x", " "),
        ("thinking", "<think>x</think>", " "),
    ],
)
def test_no_piece_is_gone_through_again_for_those_that_follow(
    reader: str, start: str, piece: str
) -> None:
    """A client may have the same white space drawn for as long as it likes."""
    num_chars = 60_000
    pieces = [piece * 4] * (num_chars // len(piece) // 4)
    assert work(READERS[reader], start, pieces) < 20 * num_chars


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        ("deepseek", SECTION),
        ("deepseek", DEEPSEEK),
        ("harmony", f"<|end|>{FINAL}"),
        ("harmony", "<|end|><|start|>"),
        ("llama", f"{OTHER};"),
        ("qwen", "<tool_call>"),
        ("qwen", "<function=h>"),
    ],
)
def test_what_comes_at_once_is_gone_through_in_pieces(reader: str, text: str) -> None:
    """As to a client who has not read for a while."""
    whole = text * (100_000 // len(text))
    assert work(READERS[reader], "", [whole]) < 1000 * len(whole)
