import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.async_streams import EngineStream
from engine.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestError,
    StepError,
    UnavailableError,
)
from engine.grammar import compiler as module
from engine.grammar.compiler import Compile, GrammarCompiler, outcome
from engine.grammar.interface import CompiledGrammar, GrammarState
from engine.grammar.value import Grammar, GrammarKind
from engine.request import ChoiceSoFar, GenerationRequest, RequestId
from tests.engine.grammar.cases import (
    VOCAB_SIZE,
    hot,
    make_engine,
    prompt,
    regex,
    said,
    spelt,
    vocabulary,
)


class Counting:
    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.fails: list[BaseException] = []

    def load(self) -> Compile:
        return self.compile

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.go_on.wait()
        self.compiled.append(grammar.text)
        if self.fails:
            raise self.fails.pop()
        return vocabulary().compile(grammar)


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def compiler(counting: Counting) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(counting.load)
    yield compiler
    counting.go_on.set()
    compiler.close()


def test_each_text_once(compiler: GrammarCompiler, counting: Counting) -> None:
    counting.go_on.clear()
    futures = [compiler.submit(regex(text)) for text in ("a", "b", "a", "(", "(")]
    counting.go_on.set()
    assert futures[0].result() is futures[2].result()
    for future in futures[3:]:
        with pytest.raises(RequestError, match="unclosed"):
            outcome(future)
    assert counting.compiled == ["a", "b", "("]


def test_what_is_kept_is_bounded(
    compiler: GrammarCompiler, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    first = compiler.submit(regex("a")).result()
    for text in ("b", "a", "c"):
        compiler.submit(regex(text)).result()
    assert compiler.submit(regex("a")).result() is first, "used since"
    assert compiler.submit(regex("b")).result()
    assert counting.compiled == ["a", "b", "c", "b"]


def test_what_waits_is_bounded(
    compiler: GrammarCompiler, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    counting.go_on.clear()
    futures = [compiler.submit(regex(text)) for text in "ab"]
    assert compiler.submit(regex("a")) is futures[0]
    with pytest.raises(QueueFullError):
        compiler.submit(regex("c"))
    counting.go_on.set()
    for future in futures:
        future.result()
    compiler.submit(regex("c")).result()


def test_what_waits_is_compiled_once_however_much_does(
    compiler: GrammarCompiler, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    counting.go_on.clear()
    futures = [compiler.submit(regex(text)) for text in "abcdabcd"]
    counting.go_on.set()
    for future in futures:
        future.result()
    assert counting.compiled == list("abcd")
    compiler.submit(regex("e")).result()
    assert list(compiler._kept) == [regex("d"), regex("e")]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (BaseException("a panic"), StepError),
        (OSError("a file is away"), StepError),
        (UnavailableError("no thread is left"), UnavailableError),
    ],
)
def test_a_failure_ends_one_grammar_and_not_for_good(
    compiler: GrammarCompiler, counting: Counting, failure: BaseException, told: type[EngineError]
) -> None:
    counting.fails = [failure]
    with pytest.raises(told, match=str(failure)):
        compiler.submit(regex("a")).result()
    compiler.submit(regex("b")).result()
    compiler.submit(regex("a")).result()
    assert counting.compiled == ["a", "b", "a"]


def drawn_until_it_fails(state: GrammarState) -> str:
    """Of tokens that are possible, any."""
    rng, bits = Random(1), np.zeros(VOCAB_SIZE // 32, np.int32)
    while True:
        if problem := state.fill(bits):
            return problem
        possible = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if problem := state.accept(int(rng.choice(possible))):
            return problem


def test_a_grammar_whose_lexer_is_full_is_compiled_anew(
    compiler: GrammarCompiler, counting: Counting
) -> None:
    """All that draw by it share what it learns, and keep it in use."""
    grammar, bits = regex("[a-z ]*a[a-z ]{300}!"), np.zeros(VOCAB_SIZE // 32, np.int32)
    full = compiler.submit(grammar).result()
    assert "too many states" in drawn_until_it_fails(full.start(()))
    assert full.start(()).fill(bits) is not None
    again = compiler.submit(grammar).result()
    assert again.start(()).fill(bits) is None
    assert compiler.submit(grammar).result() is again
    assert len(counting.compiled) == len(compiler._kept) + 1 == 2


def test_a_grammar_that_one_answer_reads_in_too_many_ways_is_kept(
    compiler: GrammarCompiler, counting: Counting
) -> None:
    text = 'start: x\nx: x x | "a" | "b" | "aa" | "ab" | "ba" | "bb" | " "'
    grammar = Grammar(GrammarKind.GRAMMAR, text)
    kept = compiler.submit(grammar).result()
    bits, state, (long,) = np.zeros(VOCAB_SIZE // 32, np.int32), kept.start(()), spelt(" " * 35)
    problems = [state.fill(bits) or state.accept(long) for _ in range(20)]
    assert "Too many items" in (problems[-1] or "")
    assert compiler.submit(grammar).result() is kept


def test_nothing_after_its_end(compiler: GrammarCompiler) -> None:
    compiler.close()
    with pytest.raises(UnavailableError):
        compiler.submit(regex("a"))


@pytest.fixture
async def serving(counting: Counting) -> AsyncIterator[AsyncEngine]:
    engine = make_engine()
    engine.grammars.close()
    engine.grammars = GrammarCompiler(counting.load)
    serving = AsyncEngine(engine)
    serving.start()
    yield serving
    counting.go_on.set()
    serving.stop()


def ask(serving: AsyncEngine, name: str, grammar: Grammar | None, **more: Any) -> EngineStream:
    params = hot(grammar, max_tokens=20)
    return serving.submit(GenerationRequest(RequestId(name), prompt(), params, **more))


async def tokens(stream: EngineStream) -> list[int]:
    told: list[int] = []
    async with asyncio.timeout(30):
        async for update in stream:
            told += update.deltas[0].token_ids
    stream.close()
    return told


async def test_nobody_waits_for_anothers_grammar(serving: AsyncEngine, counting: Counting) -> None:
    counting.go_on.clear()
    waiting = ask(serving, "waits", regex("[a-z]{3}"))
    assert await tokens(ask(serving, "free", None))
    assert waiting.take() is None
    counting.go_on.set()
    assert len(said(await tokens(waiting))) == 3
    assert said(await tokens(ask(serving, "waits", regex("x")))) == "x", "the name is free again"


async def test_who_leaves_before_it_is_compiled_never_runs(
    serving: AsyncEngine, counting: Counting
) -> None:
    counting.go_on.clear()
    ask(serving, "left", regex("a")).close()
    late = ask(serving, "late", regex("a"), timeout_s=0.01)
    with pytest.raises(DeadlineError):
        await tokens(late)
    again = ask(serving, "left", regex("b"))
    counting.go_on.set()
    assert said(await tokens(again)) == "b"
    assert serving.num_open == 0
    assert not await serving.ask(lambda engine: engine.has_work)


async def test_an_answer_that_another_engine_began_is_never_refused(
    serving: AsyncEngine, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many waited at once when that engine died."""
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    counting.go_on.clear()
    waiting = ask(serving, "waits", regex("a"))
    with pytest.raises(QueueFullError):
        await tokens(ask(serving, "new", regex("b")))
    moved = ask(serving, "moved", regex("cd"), sent=(ChoiceSoFar(spelt("c")),))
    counting.go_on.set()
    assert said(await tokens(moved)) == "d"
    assert said(await tokens(waiting)) == "a"


async def test_a_refusal_comes_from_the_stream(serving: AsyncEngine) -> None:
    with pytest.raises(RequestError, match="unclosed"):
        await tokens(ask(serving, "r", regex("(")))
    assert serving.num_open == 0
    assert said(await tokens(ask(serving, "r", regex("x")))) == "x"


async def test_a_refusal_that_is_kept_keeps_nobody_who_got_it(serving: AsyncEngine) -> None:
    frames = []
    for name in "abc":
        with pytest.raises(RequestError) as caught:
            await tokens(ask(serving, name, regex("(")))
        frames.append(len(caught.traceback))
    assert len(set(frames)) == 1


async def test_a_grammar_that_is_kept_keeps_nobody_who_waited_for_it(serving: AsyncEngine) -> None:
    stream = ask(serving, "first", regex("x"))
    left = weakref.ref(stream)
    gc.disable()
    try:
        await tokens(stream)
        del stream
        for _ in range(2):  # the thread has what it was told last, until it is told something else
            await serving.ask(lambda engine: None)
        assert left() is None
    finally:
        gc.enable()
