"""However text is cut, the same is read of it, and nothing is lost."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.openai.reading.harmony_messages import MARKS
from tests.cluster.reading.readers import (
    ANALYSIS,
    BACKWARDS,
    CALL,
    DEEPSEEK,
    FENCED,
    FINAL,
    FUNCTION_GEMMA_SAYS,
    GEMMA,
    GLM,
    KIMI,
    MINIMAX,
    OLMO,
    OTHER,
    QWEN,
    READERS,
    SECTION,
    SECTION_END,
    SEED,
    TO_F,
    UNMARKED,
    of_messages,
    read,
    spans_of,
)

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
    + [SEED, "<seed:tool_call>", MINIMAX, "<minimax:", '<invoke name="f">', "</invoke>"]
    + ['<parameter name="string">', "</minimax:tool_call>", "</seed:tool_call>"]
    + [KIMI, "<|tool_call_begin|>functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_"]
    + ["<arg_key>string", "</arg_key>", "<arg_value>", "</arg_value>", "<parameter=", GLM]
    + [*MARKS, "assistant", " to=functions.f", "to=g", "analysis", "final", "commentary", " json"]
    + [f"<|end|>{FINAL}", f"<|end|><|start|>assistant{ANALYSIS}", TO_F, "<|end", "<|start|"]
    + [GEMMA, "<|tool_call>", "<tool_call|>", "call:f{", '<|"|>', 'string:<|"|>', "<|", ":", "'"]
    + ["integer:1", "array:[", '"a":', '"\\\n"', "<|channel>thought\n", "<channel|>"]
    + [OLMO, "<function_calls>", "</function_calls>", "g()\n", "f(a='", '"</function_', "')"]
    + ["<tool_calls>", "</tool_calls>"]
    + ["functools[", "functools", "<|/tool_call|>"]
    + [FUNCTION_GEMMA_SAYS, "<start_function_call>", "<end_function_call>", "string:<escape>"]
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
