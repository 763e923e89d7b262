"""An engine in a thread of its own, spoken to from an asyncio event loop."""

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.answers import Answers
from engine.async_streams import Command, EngineStream, HandOverStream, RequestStream, drop_command
from engine.engine import Engine
from engine.errors import (
    EngineDiedError,
    EngineError,
    RequestError,
    StepError,
    UnavailableError,
)
from engine.grammar.compiler import outcome
from engine.grammar.interface import CompiledGrammar
from engine.grammar.value import Grammar
from engine.handoff import FetchOutcome, PromptChunk, Quarantined, Reservation, UnfinishedReads
from engine.request import GenerationRequest, RequestId
from engine.scheduler.outbox import HandOverNews, StepOutput
from engine.watchdog import Watchdog
from kv_cache.handover import HeldRange
from kv_cache.transfers import TransferHold

logger = logging.getLogger(__name__)

# In a row: what a few requests are to blame for passes, what a broken device does not. It would
# look idle, and attract more.
_MOST_FAILED_STEPS = 10

# A thread that computes in Python keeps the interpreter for 5 ms at a time by default, which
# the event loop would pay on every message.
SWITCH_INTERVAL_S = 0.0005

Answer = TypeVar("Answer")
Stream = EngineStream | HandOverStream
AnyStream = TypeVar("AnyStream", EngineStream, HandOverStream)


class AsyncEngine:
    """Runs an engine's steps; `submit` from one event loop, the one that `start` was called on.

    Commands go to the engine's thread in order and are carried out between steps; a step's
    news comes back in one call of the event loop. `on_reserved` is called there for blocks
    that are to be filled, and its owner ends each reservation with `end_fetch`; without it
    no request may have a `fetch_above` or a `prefix`.
    """

    def __init__(
        self,
        engine: Engine,
        stall_timeout_s: float = 60.0,
        on_reserved: Callable[[Reservation], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._now = now
        engine.tell_early = self._post
        self._on_reserved = on_reserved
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._dead: str | None = None
        self._streams: dict[RequestId, Stream] = {}
        self._answers = Answers()
        self._followers: set[asyncio.Future[None]] = set()  # of the cache's events
        self._num_told = 0  # of their batches
        self._watchdog = Watchdog(stall_timeout_s)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.at_rest = False  # the thread waits for a command; it is not stuck

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()
        self._report_stall()

    def stop(self) -> None:
        """Ends the thread after the step it is in; what still runs fails."""
        self._join()
        self._fail_all(UnavailableError("the engine is stopping"))

    async def end(self) -> None:
        """The same, without holding up the event loop for the length of a step."""
        await asyncio.to_thread(self._join)
        self._fail_all(UnavailableError("the engine is stopping"))

    def _join(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self.engine.close()

    @property
    def num_open(self) -> int:
        """Requests that somebody reads."""
        return len(self._streams)

    def submit(self, request: GenerationRequest) -> EngineStream:
        assert request.hand_over is None, "there is `hand_over` for these"
        finished = {i for i, choice in enumerate(request.sent) if choice.finished}
        choices = set(range(request.params.n)) - finished
        # Without any it is refused, which its stream has to be there for.
        return self._begin(request, EngineStream(self, request.request_id, choices or {0}))

    def hand_over(self, request: GenerationRequest) -> HandOverStream:
        """Chunks of a prompt for another engine. What was read is dropped by `drop_holds`."""
        assert request.hand_over is not None
        return self._begin(request, HandOverStream(self, request.request_id))

    def _begin(self, request: GenerationRequest, stream: AnyStream) -> AnyStream:
        fetches = request.fetch_above is not None or request.prefix is not None
        assert self._on_reserved or not fetches, "nobody fills what is reserved"
        if self._dead is not None or self._stopping:
            stream.fail(self._unavailable())
            return stream
        if request.request_id in self._streams:
            stream.fail(RequestError("request_id", f"{request.request_id!r} is running already"))
            return stream
        self._streams[request.request_id] = stream  # which hears nothing before `_add`
        arrived_s = time.monotonic()
        if request.drawn_grammar is None:
            self.call(lambda engine: self._add(engine, request, stream, arrived_s))
        else:
            self._compile(request, request.drawn_grammar, stream, arrived_s)
        if request.timeout_s is not None:
            stream.end_after(request.timeout_s)
        return stream

    def _compile(
        self, request: GenerationRequest, grammar: Grammar, stream: Stream, arrived_s: float
    ) -> None:
        """The request waits for its grammar without being in anyone's way."""

        def add(engine: Engine) -> None:
            if self._streams.get(request.request_id) is stream:
                self._add(engine, request, stream, arrived_s, compiled)

        try:
            compiled = self.engine.grammars.submit(grammar, has_begun=bool(request.sent))
        except EngineError as error:
            del self._streams[request.request_id]
            stream.fail(error)
        else:
            waiting = [add]  # and not the callback itself, which stays as long as the grammar
            compiled.add_done_callback(lambda _: self.call(waiting.pop()))

    async def end_fetch(
        self,
        reservation: Reservation,
        outcome: FetchOutcome,
        unfinished: Iterable[UnfinishedReads] = (),
    ) -> Quarantined:
        """Carried out even if nobody waits for the answer: the holds of unfinished reads."""

        def end(engine: Engine) -> Quarantined:
            output, quarantined = engine.end_fetch(reservation, outcome, unfinished)
            if not output.is_empty:
                self._post(output)
            return quarantined

        return await self.ask(end)

    async def hold_cached(
        self, token_ids: Sequence[int], cache_salt: str = "", first_token: int = 0
    ) -> HeldRange:
        """As the engine's; the holds are the caller's."""
        return await self.ask(
            lambda engine: engine.hold_cached(token_ids, cache_salt, first_token),
            lambda held: self.drop_holds(held.holds),
        )

    def drop_holds(self, holds: Sequence[TransferHold]) -> None:
        self.call(lambda engine: engine.drop_holds(holds))

    def end_quarantine(self, hold: TransferHold) -> None:
        self.call(lambda engine: engine.end_quarantine(hold))

    async def ask(
        self,
        question: Callable[[Engine], Answer],
        on_lost: Callable[[Answer], None] = lambda _: None,
    ) -> Answer:
        """What the engine's thread answers between two steps."""
        if self._dead is not None or self._stopping:
            raise self._unavailable()
        return await self._answers.ask(question, self.call, self._on_loop, on_lost)

    async def newer_events(self, number: int) -> None:
        """Returns when this is not the number of the latest batch of the cache's events."""
        while self.engine.events.latest == number:
            follower = asyncio.get_running_loop().create_future()
            self._followers.add(follower)
            try:
                if self.engine.events.latest == number:  # or the thread saw no follower yet
                    await follower
            finally:
                self._followers.discard(follower)

    def _unavailable(self) -> UnavailableError:
        if self._dead is not None:
            return EngineDiedError(self._dead)
        return UnavailableError("the engine is stopping")

    @property
    def still_s(self) -> float:
        """For how long it has had work and made no step."""
        return self._watchdog.still_s(self._now())

    def check_health(self) -> None:
        if self._dead is not None:
            raise UnavailableError(self._dead)
        stalled_s = self._watchdog.stalled_s(self._now(), self.engine.expected_s)
        if stalled_s is not None:
            raise UnavailableError(f"work is queued and no step was made for {stalled_s:.0f} s")

    def _report_stall(self) -> None:
        """Says so in the log, once a period, for whoever does not ask for the health."""
        if self._stopping or self._dead is not None or self._loop is None:
            return
        try:
            self.check_health()
        except UnavailableError as error:
            logger.error("%s", error)
        self._loop.call_later(self._watchdog.timeout_s, self._report_stall)

    def call(self, command: Command) -> None:
        """Has the engine's thread do something between two steps."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def forget(self, stream: RequestStream[Any]) -> None:
        """Nobody reads the stream any more; one that was refused has no request to end."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self.call(lambda engine: engine.abort(stream.request_id))

    def _add(
        self,
        engine: Engine,
        request: GenerationRequest,
        stream: Stream,
        arrived_s: float,
        compiled: "Future[CompiledGrammar] | None" = None,
    ) -> None:
        """What was on its way to another stream of the same id is before it."""
        self._on_loop(stream.begin)
        try:
            engine.add(request, None if compiled is None else outcome(compiled), arrived_s)
        except EngineError as error:
            self._post(StepOutput({}, {request.request_id: error}))

    def _run(self) -> None:
        try:
            while self._carry_out_commands():
                self._watchdog.note(self._now(), self.engine.num_steps, self.engine.has_work)
                num_steps = self.engine.num_steps
                output = self.engine.step()
                if not output.is_empty:
                    self._post(output)
                self._tell_followers()
                self._check_steps()
                if self.engine.num_steps == num_steps:
                    self._pause()
        except BaseException as error:  # noqa: BLE001 - a bug, or a library's panic: all are told
            logger.exception("the engine's thread died")
            self._dead = f"the engine died: {error!r}"
            self._on_loop(lambda: self._fail_all(self._unavailable()))

    def _check_steps(self) -> None:
        if self.engine.num_failed >= _MOST_FAILED_STEPS:
            raise StepError(f"its last {_MOST_FAILED_STEPS} steps failed")

    def _carry_out_commands(self) -> bool:
        """Waits for work; False when the engine is to stop."""
        while True:
            with self._wake:
                while not (self._commands or self._stopping or self.engine.has_work):
                    self._watchdog.note(self._now(), self.engine.num_steps, False)
                    self._rest()
                if self._stopping:
                    return False
                commands = list(self._commands)
                self._commands.clear()
            # Also of an engine that rested: what it is asked for may hang.
            self._watchdog.note(self._now(), self.engine.num_steps, True)
            for command in commands:
                command(self.engine)
            self._tell_followers()
            if self.engine.has_work:
                return True

    def _tell_followers(self) -> None:
        latest = self.engine.events.latest
        if self._followers and self._num_told != latest:
            self._num_told = latest
            self._on_loop(self._end_waits)

    def _end_waits(self) -> None:
        for follower in self._followers:
            if not follower.done():
                follower.set_result(None)

    def _pause(self) -> None:
        """All work waits for blocks that a command will bring. What fills or reads them has
        deadlines of its own, so waiting for a transfer is no stall."""
        with self._wake:
            while not (self._commands or self._stopping):
                if self.engine.num_transfers:
                    self._watchdog.note(self._now(), self.engine.num_steps, False)
                self._rest()

    def _rest(self) -> None:
        self.at_rest = True
        self._wake.wait()
        self.at_rest = False

    def _post(self, output: StepOutput) -> None:
        self._on_loop(lambda: self._deliver(output))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self, output: StepOutput) -> None:
        for request_id, update in output.updates.items():
            stream = self._begun(request_id)
            if isinstance(stream, EngineStream):
                stream.push(update)
        for request_id, hand_over in output.hand_overs.items():
            self._deliver_hand_over(self._begun(request_id), hand_over)
        for request_id, error in output.failures.items():
            if failing := self._begun(request_id):
                del self._streams[request_id]
                failing.fail(error)
        for reservation in output.reservations:
            assert self._on_reserved is not None
            self._on_reserved(reservation)

    def _begun(self, request_id: RequestId) -> Stream | None:
        stream = self._streams.get(request_id)
        return stream if stream is not None and stream.has_begun else None

    def _deliver_hand_over(self, stream: Stream | None, hand_over: list[HandOverNews]) -> None:
        """Blocks that nobody reads are let go."""
        for news in hand_over:
            if isinstance(stream, HandOverStream):
                stream.push(news)
            elif isinstance(news, PromptChunk):
                self.call(drop_command(news))

    def _fail_all(self, error: EngineError) -> None:
        streams, self._streams = self._streams, {}  # who is told may forget others
        for stream in streams.values():
            stream.fail(error)
        self._answers.fail_all(error)
