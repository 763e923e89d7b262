"""Calls come out as they went in, however models spell them."""

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.openai.reading.gemma import GEMMA4, GemmaReader
from cluster.openai.reading.tagged import GLM45, QWEN3_CODER, TaggedReader
from tests.cluster.reading.readers import (
    READERS,
    TYPES,
    read,
)

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
        "nemotron": f"<TOOLCALL>[{', '.join(plain)}]</TOOLCALL>",
        "hunyuan": f"<tool_calls>[{', '.join(plain)}]</tool_calls>",
        "phi": f"functools[{', '.join(plain)}]",
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


def quoted(value: Any) -> str:
    """As Gemma's template prints a value."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{quoted(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(quoted, value)) + "]"
        case bool():
            return str(value).lower()
    return str(value)


bare_keys = st.from_regex(r"[abü]([abü .-]*[a-b.-])?", fullmatch=True)
gemma_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(GEMMA4[:2]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(bare_keys, inner),
    max_leaves=8,
)


@settings(max_examples=60)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from("fg"), st.dictionaries(bare_keys, gemma_values)),
        min_size=1,
        max_size=3,
    )
)
def test_calls_between_gemma_s_marks_come_out_as_they_went_in(
    calls: list[tuple[str, dict[str, Any]]],
) -> None:
    text = "".join(
        f"<|tool_call>call:{name}{quoted(arguments)}<tool_call|>" for name, arguments in calls
    )
    reasoning, content, found = read(GemmaReader(GEMMA4, {}), [text])
    assert (reasoning, content) == ("", "")
    assert [(name, json.loads(written)) for name, written in found] == calls


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
    lines = "\n".join(written)
    for reader, text in (
        ("pythonic", f"[{', '.join(written)}]"),
        ("olmo", f"<function_calls>\n{lines}\n</function_calls>"),
    ):
        reasoning, content, found = read(READERS[reader](), [text])
        assert (reasoning, content) == ("", "")
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls
