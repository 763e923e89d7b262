"""Reasoning before an answer that fits: any words between two tokens, and the grammar behind; and
tokens that lead out of the grammar."""

import re

import pytest

from engine.engine import Engine
from engine.errors import RequestError
from engine.grammar.table import GrammarTable
from engine.grammar.value import Reasoning, Tokens
from engine.request import ChoiceSoFar, FinishReason
from engine.step import Sample
from tests.engine.grammar.cases import (
    DATE,
    EOS,
    VOCAB_SIZE,
    hot,
    make_engine,
    prompt,
    regex,
    said,
    spelt,
    vocabulary,
)
from tests.engine.grammar.test_library import allowed
from tests.engine.pair import Pair
from tests.engine.sampler.cases import all_draws
from tests.engine.test_exact import run
from tests.engine.test_hand_over import answer

START, END = spelt(":")[0], spelt("\n")[0]
A, Z = spelt("aZ")  # of which no token is made
ANY = set(range(VOCAB_SIZE)) - set(EOS)
BEGUN, MAY_BEGIN = Reasoning(END), Reasoning(END, (START,))
# What begins either has a token in common, as the headers of messages have.
B, C, D = (spelt(letter)[0] for letter in "BCD")
HEADERS = Reasoning(END, start=(B, START), then=(C, D), instead=(B, D, C))
ALL = set(range(VOCAB_SIZE))
AWAY = ((C, D), (B,))
AWAY_BEHIND = Reasoning(END, (START,), exits=AWAY)


def may_follow(table: GrammarTable) -> set[int]:
    masks = table.masks(all_draws(1))
    return ALL if masks is None else allowed(masks[0])


@pytest.mark.parametrize(
    ("reasoning", "tokens", "allowed_after"),
    [
        (BEGUN, [], [ANY]),
        (BEGUN, [Z, START, END], [ANY, ANY, ANY, {A}]),
        (BEGUN, [END, A, Z], [ANY, {A}, {Z}, set(EOS)]),
        (MAY_BEGIN, [START, Z, END, A], [{START} | {A}, ANY, ANY, {A}, {Z}]),
        (MAY_BEGIN, [A, Z], [{START} | {A}, {Z}, set(EOS)]),
        (Reasoning(END, then=(C, D)), [B, END, C, D, A], [ANY, ANY, {C}, {D}, {A}, {Z}]),
        (
            HEADERS,
            [B, START, C, END, C, D, A, Z],
            [{B}, {START, D}, ANY, ANY, {C}, {D}, {A}, {Z}, set(EOS)],
        ),
        (HEADERS, [B, D, C, A, Z], [{B}, {START, D}, {C}, {A}, {Z}, set(EOS)]),
        (Reasoning(END, (B, START), (), (B,)), [B, A, Z], [{B}, {START, A}, {Z}, set(EOS)]),
    ],
)
def test_what_may_follow(
    reasoning: Reasoning, tokens: list[int], allowed_after: list[set[int]]
) -> None:
    check_what_may_follow(reasoning, (), tokens, allowed_after)


def check_what_may_follow(
    reasoning: Reasoning | None,
    exits: tuple[Tokens, ...],
    tokens: list[int],
    allowed_after: list[set[int]],
    entries: tuple[Tokens, ...] = (),
) -> None:
    """Token by token, and for a sequence that comes to its slot with them."""
    compiled, stepwise = vocabulary().compile(regex("aZ")), GrammarTable(VOCAB_SIZE, EOS)
    stepwise.enter(0, compiled, (), reasoning, exits, entries)
    for count, expected in enumerate(allowed_after):
        entered = GrammarTable(VOCAB_SIZE, EOS)
        entered.enter(0, compiled, tokens[:count], reasoning, exits, entries)
        assert may_follow(stepwise) == may_follow(entered) == expected
        complete = [0] if expected == set(EOS) else []
        assert stepwise.complete([0]) == entered.complete([0]) == complete
        for token in tokens[count : count + 1]:
            assert stepwise.accept([Sample(0, token, None)]) == {}


@pytest.mark.parametrize(
    ("reasoning", "exits", "tokens", "allowed_after"),
    [
        (None, AWAY, [A, Z], [{A, B, C}, {Z}, set(EOS)]),
        (None, AWAY, [C, D, Z, EOS[0]], [{A, B, C}, {D}, ALL, ALL, ALL]),
        (None, AWAY, [B, END], [{A, B, C}, ALL, ALL]),
        # What fits begins as they do.
        (None, ((A, D),), [A, Z], [{A}, {D, Z}, set(EOS)]),
        (None, ((A, D),), [A, D, B], [{A}, {D, Z}, ALL, ALL]),
        (None, ((A, Z, B),), [A, Z], [{A}, {Z}, {B, *EOS}]),
        (None, ((A, Z, B),), [A, Z, B], [{A}, {Z}, {B, *EOS}, ALL]),
        (BEGUN, AWAY, [C, D, END, A], [ANY, ANY, ANY, {A}, {Z}]),
        (AWAY_BEHIND, (), [A, Z], [{START, A}, {Z}, set(EOS)]),
        (AWAY_BEHIND, (), [START, C, D, END, A], [{START, A}, ANY, ANY, ANY, {A, B, C}, {Z}]),
        (AWAY_BEHIND, AWAY, [C, D, END], [{START, A, B, C}, {D}, ALL, ALL]),
        (AWAY_BEHIND, (), [START, END, C, D], [{START, A}, ANY, {A, B, C}, {D}, ALL]),
        (HEADERS, AWAY, [B, END], [{B, C}, ALL, ALL]),
    ],
)
def test_some_beginnings_lead_out_of_the_grammar(
    reasoning: Reasoning | None,
    exits: tuple[Tokens, ...],
    tokens: list[int],
    allowed_after: list[set[int]],
) -> None:
    check_what_may_follow(reasoning, exits, tokens, allowed_after)


def test_every_end_is_kept_out_of_it() -> None:
    """Also the one whose bit is a word's sign."""
    table = GrammarTable(VOCAB_SIZE, (31, 32, 4095))
    table.enter(0, vocabulary().compile(regex("aZ")), (), BEGUN)
    assert may_follow(table) == set(range(VOCAB_SIZE)) - {31, 32, 4095}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def parts(tokens: list[int]) -> tuple[list[int], list[int]]:
    cut = tokens.index(END)
    return tokens[:cut], tokens[cut + 1 :]


def test_answers_fit_behind_their_reasoning(engine: Engine) -> None:
    jobs = {str(i): (prompt(f"{i}: "), hot(regex(DATE), i, reasoning=BEGUN)) for i in range(12)}
    ended = [told for told in run(engine, jobs).values() if END in told.tokens[0]]
    assert len(ended) > len(jobs) / 2
    lengths = set()
    for told in ended:
        reasoning, rest = parts(told.tokens[0])
        lengths.add(len(reasoning))
        assert not set(EOS) & set(reasoning)
        assert told.reasons[0] is FinishReason.STOP
        assert re.fullmatch(DATE, said(rest))
    assert len(lengths) > 2


def test_a_model_may_reason_or_not(engine: Engine) -> None:
    likely = {START: 17.0, END: 17.0}
    told = answer(
        engine, prompt(), hot(regex(DATE), 1, n=16, reasoning=MAY_BEGIN, logit_bias=likely)
    )
    begun = [told.tokens[i][0] == START for i in range(16)]
    assert len(set(begun)) == 2
    for i, has_begun in enumerate(begun):
        rest = parts(told.tokens[i])[1] if has_begun else told.tokens[i]
        assert re.fullmatch(DATE, said(rest))


def test_what_stands_around_it_is_written(engine: Engine) -> None:
    params = hot(regex(DATE), 1, n=16, reasoning=HEADERS, temperature=10.0, logit_bias={END: 100.0})
    told = answer(engine, prompt(), params)
    answers = [told.tokens[i] for i in range(16)]
    reasons = [tokens[:2] == [B, START] for tokens in answers]
    assert len(set(reasons)) == 2
    for tokens, has_reasoning in zip(answers, reasons, strict=True):
        header = HEADERS.then if has_reasoning else HEADERS.instead
        rest = parts(tokens)[1] if has_reasoning else tokens
        assert tuple(rest[: len(header)]) == header
        assert re.fullmatch(DATE, said(rest[len(header) :]))


def test_an_answer_fits_or_leads_out(engine: Engine) -> None:
    likely = {C: 13.0, **dict.fromkeys(EOS, 12.0)}
    params = hot(regex(DATE), 1, n=16, exits=((C, D),), logit_bias=likely)
    told = answer(engine, prompt(), params)
    answers = [told.tokens[i] for i in range(16)]
    led_out = [tokens for tokens in answers if tokens[0] == C]
    assert 0 < len(led_out) < len(answers)
    for tokens in answers:
        if tokens[0] == C:
            assert tokens[1] == D
        else:
            assert re.fullmatch(DATE, said(tokens))
    assert any(not re.search(DATE, said(tokens)) for tokens in led_out)
    assert any(tokens[-1] in EOS for tokens in led_out), "they end as any other"


def test_what_led_out_stays_out_wherever_it_was(engine: Engine) -> None:
    params = hot(regex(DATE), 3, exits=((C, D),), logit_bias={C: 100.0}, max_tokens=8)
    whole = answer(engine, prompt(), params).tokens[0]
    assert whole[:2] == [C, D]
    for cut in range(4):
        told = answer(engine, prompt(), params, (ChoiceSoFar(whole[:cut]),))
        assert told.tokens[0] == whole[cut:]


@pytest.mark.parametrize("reasoning", [BEGUN, HEADERS])
def test_it_goes_on_wherever_it_was(engine: Engine, reasoning: Reasoning) -> None:
    params = hot(regex(DATE), 3, reasoning=reasoning, logit_bias={D: -100.0})  # not `instead`
    whole = answer(engine, prompt(), params).tokens[0]
    num_reasoning = len(parts(whole)[0])
    for cut in {0, 1, 2, *(num_reasoning + more for more in range(5))}:
        told = answer(engine, prompt(), params, (ChoiceSoFar(whole[:cut]),))
        assert told.tokens[0] == whole[cut:]


def test_a_prompt_from_another_engine(engine: Engine) -> None:
    params = hot(regex(DATE), 3, reasoning=BEGUN)
    pair = Pair(make_engine(max_num_batched_tokens=24), make_engine())
    told = pair.run({"r": (prompt(), params)})["r"]
    assert told.tokens == answer(engine, prompt(), params).tokens


def test_it_begins_and_ends_with_two_tokens_of_the_models() -> None:
    with pytest.raises(RequestError, match="reasoning: begins and ends with the same token"):
        hot(regex("a"), reasoning=Reasoning(END, (END,)))
    with pytest.raises(RequestError, match="reasoning: each of its marks must be at most 1024"):
        hot(regex("a"), reasoning=Reasoning(END, then=(A,) * 1025))
    for wrong in (
        Reasoning(VOCAB_SIZE),
        Reasoning(END, (VOCAB_SIZE,)),
        Reasoning(END, then=(VOCAB_SIZE,)),
        Reasoning(END, (START,), instead=(VOCAB_SIZE,)),
        Reasoning(END, exits=((A,), (VOCAB_SIZE,))),
    ):
        with pytest.raises(RequestError, match=f"reasoning: token {VOCAB_SIZE}"):
            hot(regex("a"), reasoning=wrong).check_token_ids(VOCAB_SIZE)


def test_what_leads_out_is_tokens_of_the_models_and_leads_out_of_a_grammar() -> None:
    with pytest.raises(RequestError, match=f"exits: token {VOCAB_SIZE}"):
        hot(regex("a"), exits=((A,), (A, VOCAB_SIZE))).check_token_ids(VOCAB_SIZE)
    with pytest.raises(RequestError, match="entries: do not go with exits"):
        hot(regex("a"), exits=((A,),), entries=((A,),))
    for wrong in ((), (A,) * 1025):
        with pytest.raises(RequestError, match="exits: each must name 1 to 1024 tokens"):
            hot(regex("a"), exits=((A,), wrong))
    with pytest.raises(RequestError, match="exits: 1025 of them"):
        hot(regex("a"), exits=((A,),) * 1025)
    with pytest.raises(RequestError, match="reasoning.exits: each must name 1 to 1024 tokens"):
        hot(regex("a"), reasoning=Reasoning(END, exits=((),)))
    with pytest.raises(RequestError, match="exits: go with a grammar alone"):
        hot(None, exits=((A,),))
