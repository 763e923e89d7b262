import threading
from collections.abc import Iterator

import pytest

from engine.errors import QueueFullError, RequestError, StepError, UnavailableError
from engine.grammar import compiler as module
from engine.grammar.compiler import Compile, GrammarCompiler
from engine.grammar.interface import CompiledGrammar
from engine.grammar.value import Grammar
from tests.engine.grammar.cases import regex, vocabulary


class Counting:
    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def load(self) -> Compile:
        return self.compile

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.go_on.wait()
        self.compiled.append(grammar.text)
        if grammar.text == "panic":
            raise BaseException("a panic")
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
            future.result()
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


def test_a_panic_ends_one_grammar(compiler: GrammarCompiler) -> None:
    with pytest.raises(StepError, match="a panic"):
        compiler.submit(regex("panic")).result()
    compiler.submit(regex("a")).result()


def test_nothing_after_its_end(compiler: GrammarCompiler) -> None:
    compiler.close()
    with pytest.raises(UnavailableError):
        compiler.submit(regex("a"))
