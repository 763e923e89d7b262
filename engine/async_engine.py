"""An engine in a thread of its own, spoken to from an asyncio event loop."""

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Self

from engine.engine import Engine
from engine.errors import EngineError, RequestError, UnavailableError
from engine.request import ChoiceDelta, GenerationRequest, GenerationUpdate, PromptReport, RequestId
from engine.scheduler.outbox import StepOutput
from engine.watchdog import Watchdog

logger = logging.getLogger(__name__)

# A thread that computes in Python keeps the interpreter for 5 ms at a time by default, which
# the event loop would pay on every message.
SWITCH_INTERVAL_S = 0.0005
IDLE_POLL_S = 0.002


class EngineStream:
    """The updates of one request; used on its event loop's thread only."""

    def __init__(self, engine: "AsyncEngine", request_id: RequestId, num_choices: int) -> None:
        self.request_id = request_id
        self._engine = engine
        self._open = set(range(num_choices))  # choices whose end is neither known nor wished
        self._updates: deque[GenerationUpdate] = deque()
        self._error: EngineError | None = None
        self._news = asyncio.Event()
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationUpdate:
        while not self._updates:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not self._open or self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._take_all()

    def _take_all(self) -> GenerationUpdate:
        """One update of all that came while nobody read."""
        if len(self._updates) == 1:
            return self._updates.popleft()
        deltas: list[ChoiceDelta] = []
        prompt: PromptReport | None = None
        for update in self._updates:
            deltas += update.deltas
            prompt = prompt or update.prompt
        self._updates.clear()
        return GenerationUpdate(deltas, prompt)

    def push(self, update: GenerationUpdate) -> None:
        for delta in update.deltas:
            if delta.finish_reason is not None:
                self._open.discard(delta.choice)
        self._updates.append(update)
        self._news.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._open.clear()
        self._news.set()

    def stop_choice(self, choice: int) -> None:
        if choice not in self._open:
            return
        self._open.discard(choice)
        self._engine.call(lambda engine: engine.stop_choice(self.request_id, choice))
        self._news.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._news.set()
        self._engine.forget(self)


class AsyncEngine:
    """Runs an engine's steps; `submit` from one event loop, the one that `start` was called on.

    Commands go to the engine's thread in order and are carried out between steps; a step's
    news comes back in one call of the event loop.
    """

    def __init__(self, engine: Engine, stall_timeout_s: float = 60.0) -> None:
        self.engine = engine
        self._commands: deque[Callable[[Engine], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._dead: str | None = None
        self._streams: dict[RequestId, EngineStream] = {}
        self._watchdog = Watchdog(stall_timeout_s)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()
        self._report_stall()

    def stop(self) -> None:
        """Ends the thread after the step it is in; what still runs fails."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self.engine.close()
        self._fail_all(UnavailableError("the engine is stopping"))

    def submit(self, request: GenerationRequest) -> EngineStream:
        stream = EngineStream(self, request.request_id, request.params.n)
        if self._dead is not None or self._stopping:
            stream.fail(UnavailableError(self._dead or "the engine is stopping"))
            return stream
        if request.request_id in self._streams:
            stream.fail(RequestError("request_id", f"{request.request_id!r} is running already"))
            return stream
        self._streams[request.request_id] = stream
        self.call(lambda engine: self._add(engine, request))
        return stream

    def check_health(self) -> None:
        if self._dead is not None:
            raise UnavailableError(self._dead)
        stalled_s = self._watchdog.stalled_s(time.monotonic())
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

    def call(self, command: Callable[[Engine], None]) -> None:
        """Has the engine's thread do something between two steps."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def forget(self, stream: EngineStream) -> None:
        """Nobody reads the stream any more; one that was refused has no request to end."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self.call(lambda engine: engine.abort(stream.request_id))

    def _add(self, engine: Engine, request: GenerationRequest) -> None:
        try:
            engine.add(request)
        except EngineError as error:
            self._post(StepOutput({}, {request.request_id: error}))

    def _run(self) -> None:
        try:
            while self._carry_out_commands():
                self._watchdog.note(time.monotonic(), self.engine.num_steps, self.engine.has_work)
                num_steps = self.engine.num_steps
                output = self.engine.step()
                if output.updates or output.failures:
                    self._post(output)
                if self.engine.num_steps == num_steps:
                    self._pause()
        except Exception as error:  # noqa: BLE001 - a bug of ours: everyone is told
            logger.exception("the engine's thread died")
            self._dead = f"the engine died: {error!r}"
            self._on_loop(lambda: self._fail_all(UnavailableError(str(self._dead))))

    def _carry_out_commands(self) -> bool:
        """Waits for work; False when the engine is to stop."""
        while True:
            with self._wake:
                while not (self._commands or self._stopping or self.engine.has_work):
                    self._watchdog.note(time.monotonic(), self.engine.num_steps, False)
                    self._wake.wait()
                if self._stopping:
                    return False
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                command(self.engine)
            if self.engine.has_work:
                return True

    def _pause(self) -> None:
        """All work waits for something that no step brings about, such as a transfer's end."""
        with self._wake:
            if not self._commands:
                self._wake.wait(IDLE_POLL_S)

    def _post(self, output: StepOutput) -> None:
        self._on_loop(lambda: self._deliver(output))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self, output: StepOutput) -> None:
        for request_id, update in output.updates.items():
            if stream := self._streams.get(request_id):
                stream.push(update)
        for request_id, error in output.failures.items():
            if stream := self._streams.pop(request_id, None):
                stream.fail(error)

    def _fail_all(self, error: EngineError) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
