"""Stop strings against an oracle that looks at the text character by character."""

import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer, TextOptions
from engine.text.stops import StopMatcher
from engine.text.tokenizer import Tokenizer

# Few letters, so that stop strings occur, overlap and almost occur.
texts = st.text(alphabet="abc", max_size=24)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def truncate(text: str, stops: list[str], *, include: bool, quiet: int = 0) -> tuple[str, str]:
    """Ends at the first character, from `quiet` on, at which some stop string ends."""
    for end in range(quiet + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, ""


@pytest.mark.parametrize("include", [False, True])
@settings(max_examples=200)
@given(text=texts, stops=stops, data=st.data())
def test_any_cut_gives_the_oracles_text(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    shown, found, rest = "", None, text
    while rest and found is None:
        size = data.draw(st.integers(1, len(rest)))
        piece, found = matcher.push(rest[:size])
        shown, rest = shown + piece, rest[size:]
    if found is None:
        shown += matcher.finish()
    assert (shown, found or "") == truncate(text, stops, include=include)


@settings(max_examples=200)
@given(text=texts, stops=stops, quiet=st.integers(0, 12), include=st.booleans())
@example(text="abab", stops=["ab"], quiet=3, include=False)
def test_no_match_ends_before_min_tokens(
    text: str, stops: list[str], quiet: int, include: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    shown, found = "", None
    for position, char in enumerate(text):
        piece, found = matcher.push(char, may_stop=position >= quiet)
        shown += piece
        if found is not None:
            break
    else:
        shown += matcher.finish()
    assert (shown, found or "") == truncate(text, stops, include=include, quiet=quiet)


@settings(max_examples=200)
@given(text=texts, stops=stops, size=st.integers(1, 5))
def test_shows_all_that_cannot_become_a_stop_string(text: str, stops: list[str], size: int) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for start in range(0, len(text), size):
        piece, found = matcher.push(text[start : start + size])
        shown += piece
        if found is not None:
            return
        held = text[: start + size][len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_stop_string_across_tokens_ends_at_its_last_token(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("one\n\ntwo three")
    detokenizer = Detokenizer(byte_level.pieces, options=TextOptions(stop=("o thr",)))
    shown, used = "", 0
    for token_id in token_ids:
        delta = detokenizer.push([token_id])
        shown, used = shown + delta.text, used + delta.num_tokens
        if delta.stop:
            break
    assert (shown, delta.stop) == ("one\n\ntw", "o thr")
    assert "o thr" in byte_level.decode(token_ids[:used])
    assert "o thr" not in byte_level.decode(token_ids[: used - 1])


def test_tokens_after_the_stop_string_are_not_used(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("one two") + byte_level.encode(" and far more text")
    options = TextOptions(stop=("two",), include_stop_str_in_output=True, track_offsets=True)
    detokenizer = Detokenizer(byte_level.pieces, options=options)
    delta = detokenizer.push(token_ids)
    num_used = len(byte_level.encode("one two"))
    assert delta == ("one two", num_used, "two")
    assert len(detokenizer.offsets or ()) == num_used


def test_text_that_nearly_stops_comes_out_in_the_end(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level.pieces, options=TextOptions(stop=("fox jumps!",)))
    shown = detokenizer.push(byte_level.encode("the fox jumps")).text
    assert shown == "the "
    assert detokenizer.finish().text == "fox jumps"


def test_text_that_is_held_costs_no_more_the_longer_it_is() -> None:
    """A client chooses its stop strings, and may have a model repeat one character."""
    stops = ["a" * (1023 - length) + "b" * length for length in range(1023, 0, -33)]
    matcher = StopMatcher(stops)
    for _ in range(2000):
        matcher.push("a")
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        assert matcher.push("a") == ("a", None)
    finally:
        sys.setprofile(before)
    assert num_calls < 20 * len(stops)
