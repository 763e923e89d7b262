"""How many of the tokens are reasoning, by where its marks are."""

from itertools import accumulate, pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.openai.reading.harmony import Harmony, HarmonyTokens
from cluster.openai.reading.harmony_messages import MARKS
from cluster.openai.reading.parts import (
    PlainReader,
)
from cluster.openai.reading.reasoning_tokens import ReasoningTokens
from engine.text.pieces import Pieces, PieceTable
from tests.cluster.reading.readers import (
    ANALYSIS,
    THINK,
    read,
    spans_of,
    thinking,
)


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
