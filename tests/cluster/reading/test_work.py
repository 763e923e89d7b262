"""Nothing waits longer than it must, and no piece is gone through again and again."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cluster.openai.reading.hermes import HermesReader
from cluster.openai.reading.parts import (
    CallArguments,
    CallStart,
    Content,
    Reader,
)
from cluster.openai.reading.tagged import QWEN3_CODER, TaggedReader
from tests.cluster.reading.readers import (
    ANALYSIS,
    CALL,
    DEEPSEEK,
    FINAL,
    GEMMA,
    KIMI,
    MINIMAX,
    OTHER,
    QWEN,
    READERS,
    SECTION,
    TO_F,
    TOOLS,
)


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
        ("gemma", "<|tool_call>", " "),
        ("gemma", "<|tool_call>call:f{", " ,"),
        ("gemma", "<|tool_call>call:f{a", " "),
        ("gemma", "<|tool_call>call:f{a:", " "),
        ("gemma", "<|tool_call>call:f{a:", "x"),
        ("gemma", "<|tool_call>call:f{a:[", "[1,"),
        ("gemma", '<|tool_call>call:f{a:<|"|>', "x"),
        ("gemma", "<|tool_call>call:f{a:'", 'x"'),
        ("gemma", GEMMA, " }"),
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
        ("olmo", "<function_calls>", " "),
        ("olmo", "<function_calls>f(a='", "\\x"),
        ("olmo", "<function_calls>f(a='", "</function_calls>"),
        ("phi", "functools[", " "),
        ("phi", f"functools[{CALL}", " ,"),
        ("phi", f"<|tool_call|>{CALL}", " "),
        ("qwen", "<tool_call><function=f><parameter=string>", "x"),
        ("qwen", "<tool_call><function=f><parameter=string>1</parameter>", " "),
        ("minimax", MINIMAX, " "),
        ("qwen", f"{QWEN}", " "),
        ("thinking", "<think>x", " "),
        ("thinking", "<think>x</think>", " "),
    ],
)
def test_no_piece_is_gone_through_again_for_those_that_follow(
    reader: str, start: str, piece: str
) -> None:
    """A client may have the same white space drawn for as long as it likes."""
    num_chars = 20_000
    pieces = [piece * 4] * (num_chars // len(piece) // 4)
    assert work(READERS[reader], start, pieces) < 20 * num_chars


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        ("deepseek", SECTION),
        ("deepseek", DEEPSEEK),
        ("gemma", "<|tool_call>call:f{a:<"),
        ("gemma", GEMMA),
        ("harmony", f"<|end|>{FINAL}"),
        ("harmony", "<|end|><|start|>"),
        ("llama", f"{OTHER};"),
        ("olmo", "<function_calls>g()</function_calls>"),
        ("olmo", "<function_calls>"),
        ("qwen", "<tool_call>"),
        ("qwen", "<function=h>"),
    ],
)
def test_what_comes_at_once_is_gone_through_in_pieces(reader: str, text: str) -> None:
    """As to a client who has not read for a while."""
    whole = text * (100_000 // len(text))
    assert work(READERS[reader], "", [whole]) < 1000 * len(whole)
