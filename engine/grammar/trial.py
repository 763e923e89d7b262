"""Whether a grammar can be compiled, found out where it can do no harm.

Some grammars of a few hundred bytes would be compiled for hours, past all of the library's own
limits, and a thread cannot be stopped. So whoever lets strangers in has each grammar compiled in
a child process first, which is killed when it takes too long.
"""

import asyncio
import contextlib
import json
import logging
import math
import selectors
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from engine.errors import QueueFullError, UnavailableError, UnprocessableError
from engine.grammar.value import Grammar, GrammarKind

logger = logging.getLogger(__name__)

MAX_KEPT = 1024
MAX_WAITING = 64
COMPILE_S = 5.0  # of processor time, which a grammar takes however busy the machine is
PATIENCE = 4.0  # times that, by the clock
# A child that starts reads a vocabulary, of which the largest take some seconds.
START_S = 60.0
# A very busy machine fails any grammar, so a child that did not answer has said nothing for good;
# nor may one that never compiles be tried all the time.
UNANSWERED_S = 60.0
_EASY = Grammar(GrammarKind.CHOICE, '["a"]')
_PROGRAM = "import sys; sys.path[:] = {path!r}; from engine.grammar.trial_child import main; main()"


class _Finding(NamedTuple):
    problem: str | None
    until: float = math.inf  # by the trial's `now`


class _Asked:
    """A grammar that is tried, or waits for it, as long as somebody wants to know."""

    def __init__(self, finding: "asyncio.Future[_Finding]") -> None:
        self.finding = finding
        self.num_askers = 0
        self.callers: set[str] = set()  # in whose lines it waits, or did


class GrammarTrial:
    """Used on one event loop; tries one grammar at a time, of each caller in turn: whoever asks for
    many that take long waits for them alone. The child starts with the first one, and ends with
    this process or with `close`."""

    def __init__(
        self,
        write_tokenizer: Callable[[], str],  # takes a while for a large one
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        compile_s: float = COMPILE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write_tokenizer = write_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compile_s = compile_s
        self._now = now
        self._thread = ThreadPoolExecutor(1, "grammar-trial")  # owns the child
        self._child: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[Grammar, _Finding] = OrderedDict()
        self._asked: dict[Grammar, _Asked] = {}
        self._lines: dict[str, dict[Grammar, None]] = {}  # by caller; who comes next is first
        self._tried: Grammar | None = None

    async def check(self, grammar: Grammar, caller: str = "") -> None:
        """UnprocessableError, of the field `grammar`, where it cannot be compiled in time."""
        finding = self._known.get(grammar)
        if finding is not None and self._now() < finding.until:
            self._known.move_to_end(grammar)
        else:
            finding = await self._learn(grammar, caller)
        if finding.problem is not None:
            raise UnprocessableError("grammar", finding.problem)

    def close(self) -> None:
        self._thread.submit(self._end_child)
        self._thread.shutdown()

    async def _learn(self, grammar: Grammar, caller: str) -> _Finding:
        """Whoever asks for the same meanwhile is told the same; when all of them have left, its
        place is free, unless it is being tried: then what is found is kept."""
        if grammar != self._tried:
            self._line_up(grammar, caller)
        asked = self._asked[grammar]
        asked.num_askers += 1
        try:
            return await asyncio.shield(asked.finding)
        finally:
            asked.num_askers -= 1
            waits = self._asked.get(grammar) is asked and grammar != self._tried
            if waits and not asked.num_askers:
                self._take_out(grammar)

    def _line_up(self, grammar: Grammar, caller: str) -> None:
        """Also where it waits in another's line already, which may be a long one."""
        line = self._lines.get(caller, {})
        if grammar not in line:
            tried = self._asked.get(self._tried) if self._tried else None
            num_waiting = len(line) + (tried is not None and caller in tried.callers)
            if num_waiting >= MAX_WAITING:
                raise QueueFullError(f"{num_waiting} grammars wait to be compiled")
            self._lines.setdefault(caller, {})[grammar] = None
        finding = asyncio.get_running_loop().create_future()
        self._asked.setdefault(grammar, _Asked(finding)).callers.add(caller)
        self._try_next()

    def _take_out(self, grammar: Grammar) -> _Asked | None:
        """Of all lines."""
        asked = self._asked.pop(grammar, None)
        for caller in asked.callers if asked else ():
            line = self._lines.get(caller, {})
            line.pop(grammar, None)
            if not line:
                self._lines.pop(caller, None)
        return asked

    def _try_next(self) -> None:
        if self._tried is not None or not self._lines:
            return
        caller, line = next(iter(self._lines.items()))
        self._lines[caller] = self._lines.pop(caller)  # behind the others
        grammar = self._tried = next(iter(line))
        asked = self._take_out(grammar)
        assert asked is not None
        self._asked[grammar] = asked
        work = asyncio.wrap_future(self._thread.submit(self._try, grammar))
        work.add_done_callback(lambda _: self._note(grammar, work))

    def _note(self, grammar: Grammar, work: "asyncio.Future[_Finding]") -> None:
        self._tried = None
        finding = self._asked.pop(grammar).finding
        if work.cancelled():
            finding.cancel()
        elif error := work.exception():
            finding.set_exception(error)
            finding.exception()  # nobody may want to know
        else:
            finding.set_result(work.result())
            self._keep(grammar, work.result())
        self._try_next()

    def _keep(self, grammar: Grammar, finding: _Finding) -> None:
        self._known[grammar] = finding
        self._known.move_to_end(grammar)
        if len(self._known) > MAX_KEPT:
            self._known.popitem(last=False)

    def _try(self, grammar: Grammar) -> _Finding:
        if self._child is None or self._child.poll() is not None:
            self._start_child()
        try:
            line = self._ask(grammar, self._compile_s, PATIENCE * self._compile_s)
        except (OSError, TimeoutError) as error:
            logger.warning("a grammar of %d characters: %s", len(grammar.text), error)
            self._end_child()
            until = self._now() + UNANSWERED_S
            return _Finding("takes too much time or memory to compile", until)
        return _Finding(json.loads(line))

    def _start_child(self) -> None:
        self._end_child()
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,  # Ctrl-C is for the process that has it
            )
            vocabulary = [self._write_tokenizer(), self._vocab_size, self._eos_token_ids]
            self._write(json.dumps(vocabulary))
            self._ask(_EASY, START_S, START_S)
        except (OSError, TimeoutError) as error:
            self._end_child()
            raise UnavailableError(f"the compiler of grammars does not start: {error}") from error

    def _ask(self, grammar: Grammar, compile_s: float, limit_s: float) -> bytes:
        self._write(json.dumps([grammar.kind, grammar.text, compile_s]))
        child = self._child
        assert child is not None
        assert child.stdout is not None
        end = time.monotonic() + limit_s
        answer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"not compiled after {limit_s:g} s")
                piece = child.stdout.read1()  # type: ignore[attr-defined]
                if not piece and child.wait() == -signal.SIGPROF:
                    raise TimeoutError(f"not compiled after {compile_s:g} s of processor time")
                if not piece:
                    raise OSError("the compiler died of it")
                answer += piece
        return answer

    def _write(self, line: str) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(line.encode() + b"\n")
        self._child.stdin.flush()

    def _end_child(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._child = None
