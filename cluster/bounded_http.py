"""The HTTP protocol of our own servers, with a bound on headers, for which uvicorn has none."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEADER_BYTES = 64 << 10
HEADER_TIMEOUT_S = 60.0


class BoundedHttp(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes
    """A connection on which a header was begun, or nothing has come yet, is closed after a while;
    who is idle between two requests is uvicorn's own business. What has come of a value is copied
    with each piece more, so that an endless one would take all of the loop's time."""

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0  # of the header that is not whole

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._forget_header()
            return
        if self._timer is None:
            self._expect_header()
        if self._awaits_header:
            self._num_bytes += len(data)
        if self._num_bytes > MAX_HEADER_BYTES:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_header()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _awaits_header(self) -> bool:
        """Or else the rest of a body comes that was answered before its end."""
        return self.cycle is None or not self.cycle.more_body

    def _expect_header(self) -> None:
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _forget_header(self) -> None:
        self._num_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
