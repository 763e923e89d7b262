"""One HTTP request and its response over ASGI, without the losses of a framework's own.

A body is read within bounds of size and time. The work on an answer is raced against the
client's disconnect and is cancelled by it. Whatever fails becomes an error in OpenAI's shape:
a response of its own, or the last event of a stream that has begun. Never silence.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from cluster.openai.errors import ApiError, api_error, internal_error, not_in_time
from engine.errors import EngineError, UnavailableError, throw

log = logging.getLogger("kvrelay.http")

Handler = Callable[["HttpExchange"], Awaitable[None]]
Work = Coroutine[Any, Any, None]
DONE = b"data: [DONE]\n\n"  # the end of a stream, also of one that failed
_AS_IT_IS = "identity"  # of a body: not compressed
_LAST_WORDS_S = 3.0  # for a client to take them; then it is as good as gone
_PART_BYTES = 1 << 20
_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
)


def _last_event(error: ApiError) -> bytes:
    return error.event() + DONE


@dataclass(frozen=True)
class HttpLimits:
    """Bounds on what one request may take."""

    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 60.0
    request_timeout_s: float = 3600.0  # from the whole body to the end of the answer


class Disconnected(Exception):
    """The client is gone; there is nobody to answer."""


class HttpExchange:
    """A request's headers and body, and its response. Used by one task, but for `fail`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.caller = ""  # the name of the key that it came with
        self.status: int | None = None  # of the answer, once that has begun
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self._last_words: Callable[[ApiError], bytes] | None = None  # of a stream that has begun
        self._is_half_out = False  # an answer in whose middle no error can be told
        self._failure: ApiError | None = None
        # That runs the work; None once its end has been asked for.
        self._racing: asyncio.Task[Any] | None = None

    def header(self, name: str) -> str | None:
        value = self._headers.get(name.lower().encode())
        return None if value is None else value.decode("latin-1")

    async def read_body(self, limits: HttpLimits) -> bytes:
        if (coding := self.header("content-encoding") or _AS_IT_IS).lower() != _AS_IT_IS:
            raise ApiError(415, f"a body's Content-Encoding must be {_AS_IT_IS}, not {coding}")
        if _declared_bytes(self.header("content-length")) > limits.max_body_bytes:
            raise _too_large(limits)
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                return await self._read_all(limits)
        except TimeoutError as error:
            message = f"the body was not complete after {limits.body_timeout_s:g} s"
            raise ApiError(408, message, "timeout_error") from error

    async def _read_all(self, limits: HttpLimits) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limits.max_body_bytes:
                raise _too_large(limits)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def send_json(
        self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        extra = [(k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [_JSON, length, *extra])
        await self._send({"type": "http.response.body", "body": body})

    async def send_long_json(self, pieces: AsyncIterator[bytes]) -> None:
        """Whose length is not known before its end, unless it is short after all."""
        part: list[bytes] = []
        num_bytes, started = 0, False
        async for piece in pieces:
            part.append(piece)
            num_bytes += len(piece)
            if num_bytes < _PART_BYTES:
                continue
            if not started:
                await self._start(200, [_JSON])
                started = self._is_half_out = True
            await self._send_part(part)
            part, num_bytes = [], 0
        if started:
            await self._send_part(part, last=True)
        else:
            await self.send_json(b"".join(part))

    async def _send_part(self, part: list[bytes], *, last: bool = False) -> None:
        body = b"".join(part)
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def send_text(self, body: bytes, content_type: str) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(200, [(b"content-type", content_type.encode()), length])
        await self._send({"type": "http.response.body", "body": body})

    async def start_events(self, last_words: Callable[[ApiError], bytes] = _last_event) -> None:
        """`last_words`: how the stream ends if it fails."""
        await self._start(200, list(_EVENTS))
        self._last_words = last_words

    async def send_events(self, frames: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": frames, "more_body": not last})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.status = status

    async def send_error(self, error: ApiError) -> None:
        """Disconnected, if the client reads nothing: else a server that stops would wait for it. So
        it is in the middle of an answer, whose end is then missing."""
        if self._is_half_out:
            raise Disconnected
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                if self._last_words is not None:
                    await self.send_events(self._last_words(error), last=True)
                else:
                    await self.send_json(error.body(), error.status, error.headers)
        except TimeoutError as timeout:
            raise Disconnected from timeout

    async def race(self, work: Work, timeout_s: float, overtime_s: float = 0.0) -> None:
        """Runs `work`, unless the client leaves, `fail` is called, or the time is over first: it is
        cancelled then, and its own clean-up ends what it started at the engine.
        `overtime_s`: for work that knows of its time itself, and can tell what it waited for.

        The body must have been read: what the client sends after it is its disconnect.
        """
        self._racing = task = asyncio.current_task()
        assert task is not None
        num_before = task.cancelling()
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(timeout_s + overtime_s) as time:
                await work
        except asyncio.CancelledError:
            if self._racing is not None or task.uncancel() > num_before:
                raise  # by whoever runs the server
            throw(self._reason())
        except TimeoutError:
            if not time.expired():
                raise
            raise not_in_time("not finished in the request's time", timeout_s) from None
        finally:
            self._racing = None
            watch.cancel()

    def fail(self, error: ApiError) -> None:
        """Ends the exchange's work, from the outside, with an error for the client."""
        if self._racing is not None:
            self._failure = error
            self._end_race()

    def _reason(self) -> Exception:
        failure, self._failure = self._failure, None
        return failure or Disconnected()

    async def _watch(self) -> None:
        """Until the client leaves."""
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        finally:
            self._end_race()

    def _end_race(self) -> None:
        task, self._racing = self._racing, None
        if task is not None:
            task.cancel()


class Endpoint:
    """An ASGI application around a handler: every way it can end is answered here. `count`: with
    the status of each answer, at its end."""

    def __init__(self, handle: Handler, count: Callable[[int], None]) -> None:
        self._handle = handle
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        try:
            await self._answer(exchange)
        except Disconnected:
            log.debug("client of %s left", exchange.path)
        finally:
            if exchange.status is not None:
                self._count(exchange.status)

    async def _answer(self, exchange: HttpExchange) -> None:
        try:
            await self._handle(exchange)
        except ApiError as error:
            await exchange.send_error(error)
        except EngineError as error:
            answer = api_error(error)
            # What makes an engine unavailable is in the log already, once and not for each client.
            if answer.status >= 500 and not isinstance(error, UnavailableError):
                log.error("%s failed: %s", exchange.path, error)
            await exchange.send_error(answer)
        except Disconnected:
            raise
        except Exception:
            log.exception("%s failed", exchange.path)
            await exchange.send_error(internal_error())


def _declared_bytes(value: str | None) -> float:
    """0 where a header says nothing, or nonsense: the body is counted as it comes."""
    if value is None or not (value.isascii() and value.isdigit()):
        return 0
    return float(value)  # of any number of digits


def _too_large(limits: HttpLimits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.max_body_bytes} bytes")
