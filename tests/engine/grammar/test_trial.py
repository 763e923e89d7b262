import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from engine.errors import QueueFullError, RequestError, UnavailableError, UnprocessableError
from engine.grammar import trial as module
from engine.grammar.trial import GrammarTrial
from engine.grammar.value import Grammar, GrammarKind
from tests.engine.grammar.cases import BOMB, EOS, PERSON, VOCAB_SIZE, regex, schema, tokenizer

# Deeper than an ordinary stack would take; the recursion of each is in its compiler.
DEEP_RULES = Grammar(
    GrammarKind.GRAMMAR,
    "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"',
)
DEEP_REFS = schema(
    {
        "$defs": {
            **{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)},
            "d1500": {},
        },
        "$ref": "#/$defs/d0",
    }
)


COMPILE_S, BOMB_S = 6.0, 1.0  # the other one is a core's work for nothing, and known to be too long


@pytest.fixture
def compile_s() -> float:
    return COMPILE_S


@pytest.fixture
def trial(compile_s: float) -> Iterator[GrammarTrial]:
    trial = GrammarTrial(tokenizer().to_json, VOCAB_SIZE, EOS, compile_s=compile_s)
    yield trial
    trial.close()


@pytest.fixture
def tried(trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """In order, those that came to a compiler."""
    tried: list[Grammar] = []
    once = trial._try

    def noted(grammar: Grammar) -> object:
        tried.append(grammar)
        return once(grammar)

    monkeypatch.setattr(trial, "_try", noted)
    return tried


async def test_says_what_the_compiler_says(trial: GrammarTrial) -> None:
    await trial.check(schema(PERSON))
    with pytest.raises(RequestError, match="unclosed group") as caught:
        await trial.check(regex("("))
    assert caught.value.field == "grammar"
    await trial.check(DEEP_RULES)
    await trial.check(DEEP_REFS)


@pytest.mark.parametrize("compile_s", [BOMB_S])
async def test_a_bomb_is_refused_and_the_next_one_compiled(
    trial: GrammarTrial, tried: list[Grammar]
) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="too much time or memory"):
            await trial.check(schema(BOMB))
    assert tried == [schema(BOMB)], "it is known"
    await trial.check(regex("[0-9]+"))


@pytest.mark.parametrize("compile_s", [2.0])
async def test_what_the_machine_does_not_give_the_child_is_no_time_of_its_grammar(
    trial: GrammarTrial, compile_s: float
) -> None:
    await trial.check(regex("a"))
    child = trial._child
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    asked = asyncio.create_task(trial.check(regex("b")))
    await asyncio.sleep(1.2 * compile_s)
    child.send_signal(signal.SIGCONT)
    await asked


async def test_a_child_that_dies_is_followed_by_another(trial: GrammarTrial) -> None:
    await trial.check(regex("a"))
    child = trial._child
    assert child is not None
    child.kill()
    child.wait()
    await trial.check(regex("b"))


async def test_a_child_that_cannot_be_started_is_tried_again(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(UnavailableError, match="does not start: .*/nowhere/python"):
            await trial.check(regex("a"))
    await trial.check(regex("a"))


async def test_a_child_that_did_not_answer_has_refused_nothing_for_good() -> None:
    time_s = 0.0
    trial = GrammarTrial(tokenizer().to_json, VOCAB_SIZE, EOS, BOMB_S, now=lambda: time_s)
    with closing(trial):
        await trial.check(regex("a"))
        child = trial._child
        assert child is not None
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(RequestError, match="too much time or memory"):
            await trial.check(regex("b"))
        await trial.check(regex("c"))
        time_s = module.UNANSWERED_S - 1
        with pytest.raises(RequestError, match="too much time or memory"):
            await trial.check(regex("b"))
        time_s = module.UNANSWERED_S
        await trial.check(regex("b"))
        with pytest.raises(RequestError, match="unclosed group"):
            await trial.check(regex("("))


async def test_who_asks_for_the_same_meanwhile_is_told_the_same(
    trial: GrammarTrial, tried: list[Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    asked = [asyncio.create_task(trial.check(regex("("))) for _ in range(5)]
    await asyncio.sleep(0)
    asked[0].cancel()
    results = await asyncio.gather(*asked[1:], return_exceptions=True)
    assert [type(result) for result in results] == [UnprocessableError] * 4
    assert tried == [regex("(")]


async def test_who_leaves_takes_its_grammar_along(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    await trial.check(regex("a"))
    child = trial._child
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    asked = [asyncio.create_task(trial.check(regex(f"a{i}"))) for i in range(2)]
    await asyncio.sleep(0)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    child.send_signal(signal.SIGCONT)
    await trial.check(regex("b"))
    assert not trial._asked


async def test_what_was_found_after_all_have_left_is_known(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one that takes too long would be tried anew for each that does not wait for it."""
    tried: list[Grammar] = []
    once, begun = trial._try, threading.Event()

    def noted(grammar: Grammar) -> object:
        tried.append(grammar)
        begun.set()
        return once(grammar)

    monkeypatch.setattr(trial, "_try", noted)
    asked = asyncio.create_task(trial.check(regex("(")))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(begun.wait, 30)
    asked.cancel()
    with pytest.raises(UnprocessableError):
        await trial.check(regex("("))
    assert tried == [regex("(")]
    assert not trial._asked


async def test_no_more_wait_than_may(trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    asked = [asyncio.create_task(trial.check(regex(f"a{i}"))) for i in range(5)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(result, QueueFullError) for result in results] == [False] * 2 + [True] * 3


async def test_each_caller_has_its_turn(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars that take long are waited for by whoever asks for them."""
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    tried: list[str] = []
    may_go_on = threading.Event()

    def noted(grammar: Grammar) -> object:
        tried.append(grammar.text)
        assert may_go_on.wait(30)
        return module._Finding(None)

    monkeypatch.setattr(trial, "_try", noted)
    asked = [asyncio.create_task(trial.check(regex(f"many {i}"), "many")) for i in range(5)]
    asked += [asyncio.create_task(trial.check(regex(f"few {i}"), "few")) for i in range(2)]
    # Which waits in another's long line already.
    asked += [asyncio.create_task(trial.check(regex("many 3"), "other"))]
    await asyncio.sleep(0)
    may_go_on.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(one, QueueFullError) for one in results] == [False] * 4 + [True] + [
        False
    ] * 3
    assert tried == ["many 0", "many 1", "few 0", "many 3", "many 2", "few 1"]
    assert not trial._asked
    assert not trial._lines
