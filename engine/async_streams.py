"""What one request's reader sees of an engine that runs in a thread of its own."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, Self, TypeVar

from engine.engine import Engine
from engine.errors import DeadlineError, EngineError, throw
from engine.handoff import PromptChunk
from engine.request import ChoiceDelta, GenerationUpdate, PromptReport, RequestId
from engine.scheduler.outbox import HandOverNews

News = TypeVar("News")
Command = Callable[[Engine], None]


class EngineThread(Protocol):
    """What a stream needs of the engine that it is of."""

    def call(self, command: Command) -> None:
        """Has the engine's thread do something between two steps."""
        ...

    def forget(self, stream: "RequestStream[Any]") -> None:
        """Nobody reads the stream any more."""
        ...


class RequestStream(ABC, Generic[News]):
    """News of one request until its last; used on its event loop's thread only."""

    def __init__(self, engine: EngineThread, request_id: RequestId) -> None:
        self.request_id = request_id
        self._engine = engine
        self._unread: deque[News] = deque()
        self._error: EngineError | None = None
        self._news = asyncio.Event()
        self._on_news: Callable[[], None] | None = None
        self._closed = False
        self._expiry: asyncio.TimerHandle | None = None
        self.has_begun = False  # the engine has the request

    def begin(self) -> None:
        self.has_begun = True

    def listen(self, on_news: Callable[[], None]) -> None:
        """It is called whenever there may be something to take, or nothing more comes: for who
        reads many, since a task for each would be woken for every token."""
        self._on_news = on_news

    @property
    def has_ended(self) -> bool:
        """All that came was taken, and nothing more will."""
        if self._unread or self._error is not None:
            return False
        return self._closed or self._has_ended()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> News:
        while (news := self.take()) is None:
            if self.has_ended:
                raise StopAsyncIteration
            await self.wait()
        return news

    async def wait(self) -> None:
        """Until `take` may have something; for a reader that must not lose what it took."""
        await self._news.wait()

    def take(self) -> News | None:
        """The next news, or None while there is none; raises what keeps the request from its
        end, once."""
        if self._unread:
            return self._take()
        if self._error is not None:
            throw(self._take_error())
        if not (self._closed or self._has_ended()):
            self._news.clear()
        return None

    def _take_error(self) -> EngineError:
        error, self._error = self._error, None
        assert error is not None
        return error

    @abstractmethod
    def _has_ended(self) -> bool:
        """Nothing more will come, or is wished."""

    @abstractmethod
    def _end(self) -> None:
        """Nothing more will come."""

    def _take(self) -> News:
        return self._unread.popleft()

    def push(self, news: News) -> None:
        self._unread.append(news)
        self._tell()

    def fail(self, error: EngineError) -> None:
        """Of a request that has ended before, all is there and is still to be read."""
        if self._has_ended():
            return
        self._error = error
        self._end()
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        if self._on_news is not None:
            self._on_news()

    def end_after(self, seconds: float) -> None:
        """The request gets no more time than that, wherever it is, read or not."""
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if not (self._closed or self._has_ended()):
            self._engine.forget(self)
            self.fail(DeadlineError("not finished in the request's time"))

    def close(self) -> None:
        """Ends the request, if it has not ended."""
        if self._closed:
            return
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._engine.forget(self)
        self._tell()
        self._on_news = None


class EngineStream(RequestStream[GenerationUpdate]):
    """The updates of a request that is answered."""

    def __init__(self, engine: EngineThread, request_id: RequestId, choices: Iterable[int]) -> None:
        super().__init__(engine, request_id)
        self._open = set(choices)  # those whose end is neither known nor wished

    def _has_ended(self) -> bool:
        return not self._open

    def _end(self) -> None:
        self._open.clear()

    def _take(self) -> GenerationUpdate:
        """One update of all that came while nobody read."""
        if len(self._unread) == 1:
            return self._unread.popleft()
        deltas: list[ChoiceDelta] = []
        prompt: PromptReport | None = None
        for update in self._unread:
            deltas += update.deltas
            prompt = prompt or update.prompt
        self._unread.clear()
        return GenerationUpdate(deltas, prompt)

    def push(self, news: GenerationUpdate) -> None:
        for delta in news.deltas:
            if delta.finish_reason is not None:
                self._open.discard(delta.choice)
        super().push(news)

    def stop_choice(self, choice: int) -> None:
        if choice not in self._open:
            return
        self._open.discard(choice)
        self._engine.call(lambda engine: engine.stop_choice(self.request_id, choice))
        self._tell()


class HandOverStream(RequestStream[HandOverNews]):
    """The chunks of a prompt that is computed for another engine, and its end.

    The holds of a chunk that was read are the reader's; those of the rest are dropped here.
    """

    def __init__(self, engine: EngineThread, request_id: RequestId) -> None:
        super().__init__(engine, request_id)
        self._ended = False

    def _has_ended(self) -> bool:
        return self._ended

    def _end(self) -> None:
        self._ended = True

    def push(self, news: HandOverNews) -> None:
        self._ended = not isinstance(news, PromptChunk)
        super().push(news)

    def close(self) -> None:
        unread, self._unread = self._unread, deque()
        for news in unread:
            if isinstance(news, PromptChunk):
                self._engine.call(drop_command(news))
        super().close()


def drop_command(chunk: PromptChunk) -> Command:
    """For a chunk that reaches nobody."""
    return lambda engine: engine.drop_holds(chunk.held.holds)
