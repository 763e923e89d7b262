"""Answers of which what stands behind some tokens must fit, and the rest is free."""

import pytest

from engine.engine import Engine
from engine.grammar.value import Reasoning, Tokens
from engine.request import ChoiceSoFar
from tests.engine.grammar.cases import EOS, hot, make_engine, prompt, regex
from tests.engine.grammar.test_opening import (
    ALL,
    END,
    START,
    A,
    B,
    C,
    D,
    Z,
    check_what_may_follow,
)
from tests.engine.pair import Pair
from tests.engine.test_hand_over import answer

MARKS = ((B,), (B, C), (D, D, C))


@pytest.mark.parametrize(
    ("reasoning", "entries", "tokens", "allowed_after"),
    [
        (None, ((B,),), [A, EOS[0], B, A, Z, A, B], [ALL, ALL, ALL, {A}, {Z}, ALL, ALL, {A}]),
        (None, MARKS, [B, A, Z, Z], [ALL, {A, C}, {Z}, ALL, ALL]),
        (None, MARKS, [B, C, A, Z], [ALL, {A, C}, {A}, {Z}, ALL]),
        (None, MARKS, [D, D, A, D, D, D, C, A], [ALL] * 7 + [{A}, {Z}]),
        (None, ((B, C, D), (B,)), [B, C, D, A], [ALL, {A, C}, {D}, {A}, {Z}]),
        # What fits goes on as an entry does.
        (None, ((B,), (B, A, D)), [B, A, D, A, Z], [ALL, {A}, {D, Z}, {A}, {Z}, ALL]),
        (None, ((B,), (B, A, D)), [B, A, Z, B], [ALL, {A}, {D, Z}, ALL, {A}]),
        (Reasoning(END), ((B,),), [B, A, END, B, A], [ALL, ALL, ALL, ALL, {A}, {Z}]),
        (Reasoning(END, (START, C)), ((B,),), [START, C, B, END, B], [ALL] * 5 + [{A}]),
        (Reasoning(END, (START, C)), ((B,),), [START, B, A], [ALL, ALL, {A}, {Z}]),
        (Reasoning(END, (START,)), ((B,),), [A, START, B], [ALL, ALL, ALL, {A}]),
    ],
)
def test_what_may_follow(
    reasoning: Reasoning | None,
    entries: tuple[Tokens, ...],
    tokens: list[int],
    allowed_after: list[set[int]],
) -> None:
    assert len(allowed_after) == len(tokens) + 1
    check_what_may_follow(reasoning, (), tokens, allowed_after, entries)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def test_each_time_what_follows_fits_and_the_answer_ends_as_any_other(engine: Engine) -> None:
    likely = {B: 8.0, EOS[0]: 5.0}
    params = hot(regex("aZ"), 2, n=16, entries=((B,),), logit_bias=likely, max_tokens=60)
    told = answer(engine, prompt(), params)
    num_words = 0
    for tokens in (told.tokens[i] for i in range(16)):
        for at, token in enumerate(tokens):
            if token == B:
                assert tokens[at + 1 : at + 3] == [A, Z][: len(tokens) - at - 1]
        num_words += len(tokens) - 3 * tokens.count(B)
    assert num_words > 16
    ended = [told.tokens[i] for i in range(16) if told.tokens[i][-1] in EOS]
    assert any(B in tokens for tokens in ended)
    assert any(B not in tokens for tokens in ended)


def test_the_other_engine_draws_the_first_token(engine: Engine) -> None:
    """Which may be an entry."""
    pair = Pair(make_engine(max_num_batched_tokens=24), make_engine())
    for likely in ({}, {B: 100.0}):
        params = hot(regex("aZ"), 3, n=2, entries=((B,),), logit_bias=likely, max_tokens=8)
        told = pair.run({"r": (prompt(), params)})["r"]
        assert told.tokens == answer(engine, prompt(), params).tokens
        assert pair.reservations[-1].draw
        assert likely == {} or told.tokens[0][:4] == [B, A, Z, B]


def test_it_goes_on_wherever_it_was(engine: Engine) -> None:
    params = hot(regex("aZ"), 3, entries=((B,),), logit_bias={B: 14.0}, max_tokens=24)
    whole = answer(engine, prompt(), params).tokens[0]
    assert whole.count(B) > 2
    for cut in range(0, len(whole), 2):
        told = answer(engine, prompt(), params, (ChoiceSoFar(whole[:cut]),))
        assert told.tokens[0] == whole[cut:]
