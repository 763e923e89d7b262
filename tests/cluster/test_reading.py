"""From text to reasoning, content and tool calls: by example, and however the text is cut."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
from cluster.openai.reading.reasoning import Marks, ReasoningReader

Read = tuple[str, str, list[tuple[str, str]]]
THINK = Marks("<think>", "</think>")


def llama() -> Reader:
    return Llama3Reader(["f", "g"])


def thinking(content: Callable[[], Reader], *, is_open: bool = False) -> Callable[[], Reader]:
    return lambda: ReasoningReader(THINK, content(), is_open=is_open)


READERS: dict[str, Callable[[], Reader]] = {
    "hermes": HermesReader,
    "llama": llama,
    "mistral": MistralReader,
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
CASES: list[tuple[str, str, Read]] = [
    ("hermes", "no call  \n", ("", "no call  \n", [])),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ("", "", WHOLE[:1])),
    (
        "hermes",
        f"I look.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}</tool_call>\n ",
        ("", "I look.", WHOLE),
    ),
    ("hermes", f"<tool_call>{CALL}</tool_call>\nDone. ", ("", "\nDone.", WHOLE[:1])),
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
    ("llama", "  ", ("", "  ", [])),
    (
        "llama",
        '<|python_tag|>brave_search.call(query="a, b", num=2)',
        ("", "", [("brave_search", '{"query": "a, b", "num": 2}')]),
    ),
    ("llama", "<|python_tag|>print('x')\n", ("", "<|python_tag|>print('x')\n", [])),
    ("mistral", f"[TOOL_CALLS][{CALL}, {OTHER}]", ("", "", WHOLE)),
    ("mistral", f"So:\n[TOOL_CALLS] [{CALL}]", ("", "So:", WHOLE[:1])),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}',
        ("", "", [("f", '{"a": 1}'), WHOLE[1]]),
    ),
    ("mistral", "[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}", ("", "", WHOLE[1:])),
    ("mistral", "[TOOL_CALLS] what?", ("", "[TOOL_CALLS] what?", [])),
    ("mistral", "[TOOL_CALLS]not a name {", ("", "[TOOL_CALLS]not a name {", [])),
    ("mistral", "[TOOL_CALLS][1]", ("", "[TOOL_CALLS][1]", [])),
    ("mistral", "[TOOL_CALLS][]", ("", "", [])),
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
    + ["<think>", "</think>", "<tool_", "[TOOL", "f", "g.call(a=1)", "{", "}", "[", "]", ";", ","]
    + ['{"name": "f", "arguments": {', '"a": "b\\"', '"', "\\", " ", "\n", CALL, OTHER, BACKWARDS]
    + ['{"name": "f", "parameters": "', '"name"', ":", "{}", "word"]
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
    }
    for reader, text in written.items():
        reasoning, content, found = read(READERS[reader](), [text])
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


def test_a_long_answer_is_read_in_no_time() -> None:
    """Work for each piece does not grow with what has been read."""
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 200_000
    reader = HermesReader()
    parts = [
        part for start in range(0, len(text), 4) for part in reader.push(text[start : start + 4])
    ]
    assert len(parts) > 40_000
