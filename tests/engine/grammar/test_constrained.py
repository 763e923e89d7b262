"""Whatever is drawn fits its grammar, and nothing that the engine does changes what is drawn."""

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from engine.engine import Engine
from engine.errors import EngineError, RequestError
from engine.grammar.library import State
from engine.grammar.value import Grammar, GrammarKind
from engine.memory import bytes_needed
from engine.request import ChoiceSoFar, FinishReason, GenerationRequest, RequestId
from engine.sampling import SamplingParams
from tests.engine.grammar.cases import (
    DATE,
    EOS,
    PERSON,
    choice,
    hot,
    make_engine,
    prompt,
    regex,
    said,
    schema,
)
from tests.engine.pair import Answer, Pair
from tests.engine.test_exact import run
from tests.engine.test_hand_over import answer

Jobs = dict[str, tuple[list[int], SamplingParams]]
PERSONS: Jobs = {f"person {i}": (prompt(f"{i}: "), hot(schema(PERSON), i)) for i in range(24)}
DATES: Jobs = {f"date {i}": (prompt(f"{i}: "), hot(regex(DATE), i)) for i in range(24)}
FREE: Jobs = {f"free {i}": (prompt(), hot(None, i, max_tokens=20)) for i in range(4)}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def test_answers_fit_their_schema(engine: Engine) -> None:
    answers = run(engine, PERSONS)
    whole = [a for a in answers.values() if a.reasons[0] is FinishReason.STOP]
    assert len(whole) > len(answers) / 2
    for told in whole:
        assert told.tokens[0][-1] in EOS
        jsonschema.validate(json.loads(said(told.tokens[0])), PERSON)
    assert len({said(told.tokens[0]) for told in whole}) > len(whole) / 2


def test_answers_fit_their_regex(engine: Engine) -> None:
    for told in run(engine, DATES).values():
        assert told.reasons[0] is FinishReason.STOP
        assert re.fullmatch(DATE, said(told.tokens[0]))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (choice("yes", 'no "\\\n', "日本🦊", " <|end|> "), r'yes|no "\\\n|日本🦊| <\|end\|> '),
        (Grammar(GrammarKind.GRAMMAR, 'root ::= "a" [0-9]{2,4} "b"'), "a[0-9]{2,4}b"),
        (Grammar(GrammarKind.GRAMMAR, 'start: W ("," W)~2\nW: /[a-c]{1,3}/'), r"\w+,\w+,\w+"),
    ],
)
def test_the_other_kinds(engine: Engine, grammar: Grammar, pattern: str) -> None:
    for told in run(engine, {str(i): (prompt(), hot(grammar, i)) for i in range(8)}).values():
        assert told.reasons[0] is FinishReason.STOP
        assert re.fullmatch(pattern, said(told.tokens[0]))


def test_cut_short_it_says_so(engine: Engine) -> None:
    for limit in (1, 3, 6):
        told = run(engine, {"r": (prompt(), hot(regex("[a-z ]{200}"), max_tokens=limit))})["r"]
        assert told.reasons[0] is FinishReason.LENGTH
        assert len(told.tokens[0]) == limit
        assert re.fullmatch("[a-z ]+", said(told.tokens[0]))


def test_neighbours_change_nothing(engine: Engine) -> None:
    """Nor does being constrained change what a free neighbour draws."""
    jobs = {**FREE, **dict(list(PERSONS.items())[:4]), **dict(list(DATES.items())[:4])}
    together = run(engine, jobs)
    for name, job in jobs.items():
        alone = run(engine, {name: job})[name]
        assert alone.tokens == together[name].tokens, name
        assert alone.reasons == together[name].reasons, name


def test_choices_go_their_own_ways(engine: Engine) -> None:
    together = answer(engine, prompt(), hot(schema(PERSON), 3, n=5, logprobs=2))
    texts = [said(together.tokens[i]) for i in range(5)]
    assert len(set(texts)) > 1
    for i, text in enumerate(texts):
        assert [entry.token_id for entry in together.logprobs[i]] == together.tokens[i]
        if together.reasons[i] is FinishReason.STOP:
            jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_is_uninterrupted(engine: Engine, mode: str) -> None:
    knobs: dict[str, Any] = {"preemption_mode": mode, "max_num_batched_tokens": 64}
    size = bytes_needed(engine.info.cache.layouts, 192, 64)
    small = make_engine(kv_cache_memory_bytes=size, **knobs)
    jobs = dict(list(PERSONS.items())[:8])
    told = run(small, jobs)
    assert small.scheduler_stats().num_preemptions > 0
    for name, expected in run(engine, jobs).items():
        assert told[name].tokens == expected.tokens


def test_going_on_from_what_was_sent(engine: Engine) -> None:
    params = hot(schema(PERSON), 5, n=2)
    whole = answer(engine, prompt(), params)
    for cut in (0, 1, 4, 9):
        sent = (ChoiceSoFar(whole.tokens[0][:cut]), ChoiceSoFar(whole.tokens[1][: cut + 1]))
        told = answer(engine, prompt(), params, sent)
        assert told.tokens[0] == whole.tokens[0][cut:]
        assert told.tokens[1] == whole.tokens[1][cut + 1 :]


def test_an_answer_that_cannot_go_on_ends_before_min_tokens(engine: Engine) -> None:
    told = answer(engine, prompt(), hot(choice("yes"), min_tokens=30))
    assert told.reasons[0] is FinishReason.STOP
    assert said(told.tokens[0]) == "yes"


def test_min_tokens_holds_while_it_can_go_on(engine: Engine) -> None:
    told = answer(engine, prompt(), hot(regex("[a-z ]*"), min_tokens=20, logit_bias={6: 50.0}))
    assert len(told.tokens[0]) == 21  # and then ends at once
    assert told.tokens[0][-1] == 6


def test_stops_end_it_anywhere(engine: Engine) -> None:
    params = hot(regex("[a-z0-9 ]{100}"), 2)
    whole = answer(engine, prompt(), params).tokens[0]
    stop = whole[5]
    told = answer(engine, prompt(), replace(params, stop_token_ids=(stop,)))
    assert told.tokens[0] == whole[: whole.index(stop) + 1]
    assert told.reasons[0] is FinishReason.STOP


def test_a_prefill_engine_leaves_the_draw_to_the_other(engine: Engine) -> None:
    pair = Pair(make_engine(max_num_batched_tokens=24), make_engine())
    for n, length in ((1, 3), (3, 40)):
        long = (prompt("One, two, three. ") * 9)[:length]
        params = hot(schema(PERSON), 4, n=n, logprobs=1, prompt_logprobs=0)
        told = pair.run({"r": (long, params)})["r"]
        told.check_equal(answer(engine, long, params))
        handed = pair.handed[-1].end
        assert handed is not None
        assert handed.first_tokens == ()
    pair.check_idle()


def test_what_is_no_grammar_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(RequestError, match="unclosed group") as caught:
        engine.add(GenerationRequest(RequestId("r"), prompt(), hot(regex("("))))
    assert caught.value.field == "grammar"
    assert not engine.has_work


def test_nothing_left_by_both_lists_fails_the_request_alone(engine: Engine) -> None:
    engine.add(GenerationRequest(RequestId("bad"), prompt(), hot(regex("x"), stop=())))
    engine.add(
        GenerationRequest(
            RequestId("worse"), prompt(), hot(regex("x"), allowed_token_ids=(0,), seed=1)
        )
    )
    failures: dict[RequestId, EngineError] = {}
    told = Answer()
    while engine.has_work:
        output = engine.step()
        failures |= output.failures
        for name in output.updates:
            assert name == "bad"
        told.take(replace(output, failures={}), "bad")
    assert list(failures) == ["worse"]
    error = failures[RequestId("worse")]
    assert isinstance(error, RequestError)
    assert error.field == "allowed_token_ids"
    assert said(told.tokens[0]) == "x"


def test_a_grammar_that_grows_too_large_in_the_middle_is_the_request_s_own_doing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles may still exceed what the library allows, once it has to be followed."""
    problem = "lexer error: too many expressions"
    monkeypatch.setattr(State, "fill", lambda self, bits: problem)
    engine.add(GenerationRequest(RequestId("large"), prompt(), hot(regex("a+"))))
    failures: dict[RequestId, EngineError] = {}
    while engine.has_work:
        failures |= engine.step().failures
    error = failures[RequestId("large")]
    assert isinstance(error, RequestError)
    assert (error.field, error.message) == ("grammar", problem)


def test_ignoring_the_end_does_not_go_with_a_grammar() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        hot(regex("a"), ignore_eos=True)
