"""The HTTP protocol of our own servers, with bounds that uvicorn has none of."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 64 << 10
MAX_UNANSWERED = 64  # requests of one connection, whose client does not wait for their answers
HEADER_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 60.0
_LINE_BYTES = 4  # of a header's line beside name and value
_REQUEST_ID = b"x-request-id"
_OF_SERVE = frozenset(
    (
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"x-session-id",
        b"serve-multiplexed-model-id",
    )
)
_FRAMING = (b"content-length", b"transfer-encoding")


class BoundedHttp(HttpToolsProtocol):
    """A connection on which a header was begun, or nothing has come yet, is closed after a while;
    who is idle between two requests is uvicorn's own business. What has come of a value is copied
    with each piece more, so that an endless one would take all of the loop's time: so it is of a
    body's trailers, which are dropped."""

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0  # since a header ended, or a piece of a body
    _header_bytes = 0  # of a header, as it was read; it may end in the piece that brought it
    _is_header = True  # or else trailers
    _is_known = False  # what the parser tells of a header

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._joining = _JoiningTransport(transport, self.loop)
        self.transport = cast(asyncio.Transport, self._joining)
        self.parser = _Parser(self)
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._unanswered:
            self._forget_header()
        elif self._timer is None:
            self._expect_header()
        if self._num_bytes > MAX_HEADER_BYTES:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_header()
        super().connection_lost(exc)
        for cycle in self._unanswered:  # uvicorn tells only the last one
            cycle.disconnected = True
            cycle.message_event.set()

    def eof_received(self) -> None:
        self._joining.flush()  # before the loop closes the transport
        super().eof_received()

    def on_message_begin(self) -> None:
        if self._is_known:
            return
        if len(self._unanswered) > MAX_UNANSWERED:
            raise ValueError("too many requests at once")
        super().on_message_begin()
        self._is_header = True
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._is_known:
            self._count_header(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_header and not self._is_known:
            self._count_header(len(name) + len(value) + _LINE_BYTES)
            super().on_header(name, value)

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("a header is too long")

    def on_headers_complete(self) -> None:
        if self._is_known:
            return
        super().on_headers_complete()
        self.flow.resume_reading()  # or a client that leaves would be missed
        self._unanswered.append(self.cycle)
        self._is_header = False
        self._num_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # or else its body is still to come
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Not into the middle of an answer, and not as one to a request before it."""
        num_before = len(self._unanswered) - (not self._is_header)
        if num_before > 0 or any(cycle.response_started for cycle in self._unanswered):
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _should_upgrade(self) -> bool:
        """Nothing here speaks WebSocket, whose protocol would take the connection from under the
        answers that are under way."""
        return False

    def stay_with_http(self, rest: bytes) -> None:
        """Where a client would rather speak another protocol, as every one of the JDK's offers
        HTTP/2 with its first request, the parser leaves what follows the header to that: another
        parser is told how long the body is, and reads on."""
        framing = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in _FRAMING]
        self.parser = _Parser(self)
        self._is_known = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        self._is_known = False
        self.parser.feed_data(rest)

    def _expect_header(self) -> None:
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _forget_header(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ReplicaHttp(BoundedHttp):
    """Of the servers that Serve starts, which reads some of a caller's header before us: a time
    after which it cuts the answer off where it is, and words in UTF-8, or else its answer is a 500
    in plain text."""

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower().replace(b"_", b"-")
        if key in _OF_SERVE:
            return
        super().on_header(name, _in_utf_8(value) if key == _REQUEST_ID else value)


def _in_utf_8(value: bytes) -> bytes:
    """What was none is no id either way, which we say ourselves."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value


class ReadHttp(BoundedHttp):
    """Whose client must read, too, what is written to it; where a front stands before the server,
    that is the front's business."""

    _stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._forget_reading()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_reading()
        super().connection_lost(exc)

    def _expect_reading(self, before: int | None = None) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes == before:
            self.transport.abort()
        else:
            self._stalled = self.loop.call_later(READ_TIMEOUT_S, self._expect_reading, num_bytes)

    def _forget_reading(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class _JoiningTransport:
    """Sends an answer's header together with what follows it in the same turn of the loop, as
    nearly all bodies' beginnings do: front and client read once, not twice."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._header = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._header:
            self._header, data = b"", self._header + data
        elif data[:5] == b"HTTP/":
            self._header = data
            self._loop.call_soon(self.flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        if self._header and not self._transport.is_closing():
            self.write(b"")


class _Parser(HttpRequestParser):
    def __init__(self, protocol: BoundedHttp) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # nothing else comes
        try:
            super().feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._protocol.stay_with_http(data[upgrade.args[0] :])


def bound_all() -> list[Any]:
    """Also the servers that Serve starts in this process. Its proxies call it where the environment
    says so, for a list of middlewares."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{ReplicaHttp.__name__}"
    return []
