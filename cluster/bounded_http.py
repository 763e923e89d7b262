"""The HTTP protocol of our own servers, with bounds that uvicorn has none of."""

from __future__ import annotations

import asyncio
from collections import deque

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 64 << 10
MAX_UNANSWERED = 64  # requests of one connection, whose client does not wait for their answers
HEADER_TIMEOUT_S = 60.0


class BoundedHttp(HttpToolsProtocol):
    """A connection on which a header was begun, or nothing has come yet, is closed after a while;
    who is idle between two requests is uvicorn's own business. What has come of a value is copied
    with each piece more, so that an endless one would take all of the loop's time: so it is of a
    body's trailers, which are dropped."""

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0  # since a header ended, or a piece of a body
    _is_header = True  # or else trailers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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

    def on_message_begin(self) -> None:
        if len(self._unanswered) > MAX_UNANSWERED:
            raise ValueError("too many requests at once")
        super().on_message_begin()
        self._is_header = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_header:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.flow.resume_reading()  # or a client that leaves would be missed
        self._unanswered.append(self.cycle)
        self._is_header = False
        self._num_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()

    def _should_upgrade(self) -> bool:
        """Nothing here speaks WebSocket, whose protocol would take the connection from under the
        answers that are under way."""
        return False

    def _expect_header(self) -> None:
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _forget_header(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bound_all() -> None:
    """Also the servers that Serve starts in this process."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedHttp.__name__}"
