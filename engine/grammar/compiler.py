"""An engine's compiled grammars, made on a thread of their own."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from engine.errors import EngineError, QueueFullError, RequestError, StepError, UnavailableError
from engine.grammar.interface import CompiledGrammar
from engine.grammar.value import Grammar

logger = logging.getLogger(__name__)

MAX_KEPT = 32
MAX_WAITING = 256
# Address space. The compiler's recursion is as deep as a text of MAX_GRAMMAR_BYTES can make it:
# rules that name each other took more than the usual 8 MiB.
STACK_BYTES = 512 << 20

Compile = Callable[[Grammar], CompiledGrammar]


class GrammarCompiler:
    """Compiles each text once while it waits, and as long as it is one of the MAX_KEPT that were
    asked for last; safe to use from any thread.

    What is refused is kept too. What failed for another reason, or is spent, is compiled anew when
    it is asked for again. `load` is called on the compiling thread, for the first grammar.
    """

    def __init__(self, load: Callable[[], Compile]) -> None:
        self._load = load
        self._compile: Compile | None = None
        self._kept: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._num_waiting = 0
        self._closed = False

    def submit(self, grammar: Grammar, has_begun: bool = False) -> "Future[CompiledGrammar]":
        """The same future for the same text, unless that is spent; for `outcome`. An answer that
        another engine began is never refused."""
        with self._lock:
            if self._closed:
                raise UnavailableError("the engine is stopping")
            future = self._kept.get(grammar)
            if future is not None and not _is_spent(future):
                self._kept.move_to_end(grammar)
                return future
            if self._num_waiting >= MAX_WAITING and not has_begun:
                raise QueueFullError(f"{self._num_waiting} grammars wait to be compiled")
            self._thread = self._thread or deep_thread("grammars")
            self._num_waiting += 1
            future = self._kept[grammar] = self._thread.submit(self._run, grammar)
            self._kept.move_to_end(grammar)
            self._evict()
        return future

    def _evict(self) -> None:
        done = [grammar for grammar, future in self._kept.items() if future.done()]
        for grammar in done[: max(0, len(self._kept) - MAX_KEPT)]:
            del self._kept[grammar]

    def close(self) -> None:
        """What waits is not compiled any more."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, grammar: Grammar) -> CompiledGrammar:
        try:
            if self._compile is None:
                self._compile = self._load()
            return self._compile(grammar)
        except RequestError:
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of the library's is no Exception
            with self._lock:
                del self._kept[grammar]
            if isinstance(error, EngineError):
                raise
            logger.exception("a grammar could not be compiled")
            raise StepError(f"compiling the grammar failed: {error!r}") from error
        finally:
            with self._lock:
                self._num_waiting -= 1


def _is_spent(future: "Future[CompiledGrammar]") -> bool:
    return future.done() and future.exception() is None and future.result().is_spent


def outcome(compiled: "Future[CompiledGrammar]") -> CompiledGrammar:
    """Of a grammar that was submitted, once it is there. A refusal is the caller's own: the one
    that is kept would gather the frames of all who raise it, and what these hold."""
    refusal = compiled.exception()
    if isinstance(refusal, RequestError):
        raise refusal.renamed(refusal.field)
    return compiled.result()


def deep_thread(name: str) -> ThreadPoolExecutor:
    """One thread with room for deep recursion."""
    executor = ThreadPoolExecutor(1, name)
    with _deep_stacks():
        executor.submit(int).result()  # starts it
    return executor


@contextmanager
def _deep_stacks() -> Iterator[None]:
    usual = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(usual)
