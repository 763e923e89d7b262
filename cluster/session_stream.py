"""An answer that comes over a session, read at the pace of its client."""

import asyncio
from collections.abc import Callable
from typing import Self

from engine.errors import EngineError, throw
from engine.request import ChoiceDelta, GenerationRequest, GenerationUpdate, PromptReport
from engine.wire.reading import NewsReader
from protos.session_pb2 import Cancel, IngressMessage, RequestNews, StopChoice

Send = Callable[[IngressMessage], None]


class SessionStream:
    """What was pushed and not read is merged. `forget` is called once, when nothing more can
    come or is wanted; `on_whole`, if that is because the answer is all there, read or not, and
    `on_failed`, if it will never be. Used on one event loop."""

    def __init__(
        self, request: GenerationRequest, send: Send, forget: Callable[["SessionStream"], None]
    ) -> None:
        self.request_id = request.request_id
        self.number = 0  # of those that its session asked for
        self._send = send
        self._forget = forget
        self._reader = NewsReader(len(request.prompt_token_ids), request.params.n)
        self._open = set(range(request.params.n)) - ended_before(request)
        self._deltas: list[ChoiceDelta] = []
        self._prompt: PromptReport | None = None
        self._error: EngineError | None = None
        self._news = asyncio.Event()
        self.on_whole: Callable[[], None] = lambda: None
        self.on_failed: Callable[[], None] = lambda: None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationUpdate:
        while not self._deltas and self._prompt is None:
            if self._error is not None:
                throw(self._take_error())
            if not self._open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        update = GenerationUpdate(self._deltas, self._prompt)
        self._deltas, self._prompt = [], None
        return update

    def read(self, news: RequestNews) -> None:
        """RequestError if the worker sends what it must not."""
        update = self._reader.read(news)
        if update is None:
            return
        self._deltas += update.deltas
        self._prompt = self._prompt or update.prompt
        self._news.set()
        ended = {delta.choice for delta in update.deltas if delta.finish_reason is not None}
        if ended:
            self._end(ended)
            if not self._open:
                self.on_whole()

    def fail(self, error: EngineError) -> None:
        """Nothing more comes; an answer that is whole already stays so."""
        if self._open:
            self._error = error
            self._end(self._open)
            self.on_failed()

    def give_up(self, error: EngineError) -> None:
        """The worker drops the request; its reader gets what has come, and then the error."""
        if self._open:
            self._send(IngressMessage(cancel=Cancel(request_id=self.request_id)))
            self.fail(error)

    def stop_choice(self, choice: int) -> None:
        if choice in self._open:
            stop = StopChoice(request_id=self.request_id, choice=choice)
            self._send(IngressMessage(stop_choice=stop))
            self._end({choice})
            if not self._open:
                self.on_whole()

    def close(self) -> None:
        if self._open:
            self._send(IngressMessage(cancel=Cancel(request_id=self.request_id)))
            self._end(self._open)

    def _take_error(self) -> EngineError:
        error, self._error = self._error, None
        assert error is not None
        return error

    def _end(self, choices: set[int]) -> None:
        if not self._open - choices:
            self._forget(self)
        self._open = self._open - choices
        self._news.set()


def ended_before(request: GenerationRequest) -> set[int]:
    """Choices that the client has whole, of a request that another worker began."""
    return {number for number, choice in enumerate(request.sent) if choice.finished}
