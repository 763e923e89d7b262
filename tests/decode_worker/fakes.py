"""Answerers without an engine: one says what the test pushes, one counts for ever."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

from decode_worker.answerer import AnswerStream, SubmittedRequest
from decode_worker.service import SessionLimits, SessionService
from engine.errors import EngineError
from engine.request import ChoiceDelta, FinishReason, GenerationUpdate, PromptReport
from protos.limits import PROTOCOL
from protos.rpc import Plane
from protos.session_pb2_grpc import add_SessionServicer_to_server
from protos.worker_pb2 import CacheFormat, CacheGroup, Limits, WorkerDescription

DESCRIPTION = WorkerDescription(
    protocol=PROTOCOL,
    incarnation=5,
    model="tiny",
    format=CacheFormat(
        fingerprint="hub:abc",
        kv_format="float32",
        block_size=16,
        groups=[CacheGroup(num_layers=1, num_kv_heads=1, widths=[8, 8], blob_bytes=4096)],
    ),
    limits=Limits(max_model_len=100, vocab_size=256),
)


class PushedStream:
    def __init__(self, submitted: SubmittedRequest) -> None:
        self.submitted = submitted
        self.stopped: list[int] = []
        self.closed = asyncio.Event()
        self._news: deque[GenerationUpdate | EngineError] = deque()
        self._ended = False
        self._on_news: Callable[[], None] = lambda: None

    def listen(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news

    def take(self) -> GenerationUpdate | None:
        news = self._news.popleft() if self._news else None
        if isinstance(news, EngineError):
            raise news
        return news

    @property
    def has_ended(self) -> bool:
        return self._ended and not self._news

    def push(self, *deltas: ChoiceDelta, prompt: PromptReport | None = None) -> None:
        self._tell(GenerationUpdate(deltas, prompt))

    def fail(self, error: EngineError) -> None:
        self._tell(error)

    def end(self) -> None:
        self._ended = True
        self._on_news()

    def _tell(self, news: GenerationUpdate | EngineError) -> None:
        self._news.append(news)
        self._on_news()

    def stop_choice(self, choice: int) -> None:
        self.stopped.append(choice)

    def close(self) -> None:
        self.closed.set()


class PushedAnswerer:
    def __init__(self) -> None:
        self.streams: list[PushedStream] = []

    def submit(self, submitted: SubmittedRequest) -> PushedStream:
        self.streams.append(PushedStream(submitted))
        return self.streams[-1]


class CountingStream(PushedStream):
    """0, 1, 2 ... at each turn of the event loop, up to the request's max_tokens."""

    def __init__(self, submitted: SubmittedRequest) -> None:
        super().__init__(submitted)
        self._counting = asyncio.create_task(self._count())

    async def _count(self) -> None:
        limit = self.submitted.request.params.max_tokens
        for token in count():
            await asyncio.sleep(0)
            if self.closed.is_set():
                return
            end = FinishReason.LENGTH if token + 1 == limit else None
            prompt = None if token else PromptReport(0)
            self.push(ChoiceDelta(0, [token], finish_reason=end), prompt=prompt)
            if end is not None:
                self.end()
                return


class CountingAnswerer:
    def submit(self, submitted: SubmittedRequest) -> AnswerStream:
        return CountingStream(submitted)


@asynccontextmanager
async def session_server(
    service: SessionService, plane: Plane | None = None, address: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    plane = plane or Plane()
    server = plane.server()
    add_SessionServicer_to_server(service, server)
    bound = plane.listen(server, address)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


async def count_for_ever() -> None:
    """The main function of a child process: says its address, and serves until it is killed."""
    service = SessionService(CountingAnswerer(), DESCRIPTION, SessionLimits())
    async with session_server(service) as address:
        print(address, flush=True)  # noqa: T201
        await asyncio.Event().wait()
