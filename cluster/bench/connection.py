"""Connections to one server: one request at a time on each, kept for the next one.

A protocol on asyncio's transport, without streams or a client library above it: the clock is read
when bytes have arrived, and nothing is queued between.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from cluster.bench.errors import BrokenAnswerError, ProtocolError
from cluster.bench.http_reader import ResponseReader
from engine.errors import ConfigError

Clock = Callable[[], float]
# Told when bytes of a body have come: the time, the status, the bytes.
TakeBody = Callable[[float, int, bytes], None]


class Address:
    """A server's URL, taken apart. A final `/v1` is no part of it."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            if "@" in parts.netloc:  # and is not shown
                raise ConfigError("url", "has a user or a password; --api-key-env brings a key")
            port = parts.port
            (parts.hostname or "").encode("idna")  # which a name of a host has to be good for
        except ValueError as error:
            raise ConfigError("url", f"{url!r}: {error}") from error
        if not (url.isascii() and url.isprintable()) or " " in url:
            raise ConfigError("url", f"{url!r}: must be ASCII, a host as xn--..., a path with %..")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError("url", f"{url!r}: must be like http://127.0.0.1:8000")
        self.ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self.host = parts.hostname
        self.port = port or (443 if self.ssl else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.header = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{self.header}{self.path}"


class Connection(asyncio.Protocol):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._take: TakeBody | None = None
        self._ended: asyncio.Future[None] | None = None
        self.heard = False  # anything of the answer to the last request

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, take: TakeBody) -> int:
        """The status, when the whole answer has been taken."""
        assert self._transport is not None
        self._reader, self._take, self.heard = ResponseReader(), take, False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended
        return self._reader.status

    @property
    def reusable(self) -> bool:
        return self._reader.reusable

    def close(self) -> None:
        """At once, also in the middle of an answer: the server then sees that nobody waits."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if self._ended is None or self._ended.done():
            self.close()  # bytes that nobody asked for
            return
        assert self._take is not None
        self.heard = True
        try:
            body = self._reader.feed(data)
            if body:
                self._take(now, self._reader.status, body)
        except ProtocolError as error:
            self._ended.set_exception(error)
            self.close()
            return
        if self._reader.complete:
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._ended is None or self._ended.done():
            return
        try:
            if error is not None:
                raise error
            self._reader.end()
        except (OSError, BrokenAnswerError) as reason:
            self._ended.set_exception(reason)
        else:
            self._ended.set_result(None)


class Connections:
    """As many as there are requests at a time; used on one event loop."""

    def __init__(self, address: Address, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, take: TakeBody) -> int:
        """The status, when the whole answer has been taken."""
        kept = self._kept()
        if kept is not None:
            try:
                return await self._on(kept, request, take)
            except (BrokenAnswerError, ConnectionError):
                # Servers close what is idle, and may do so just now: then nobody read it.
                if kept.heard:
                    raise
        return await self._on(await self._open(), request, take)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _on(self, connection: Connection, request: bytes, take: TakeBody) -> int:
        try:
            status = await connection.exchange(request, take)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _open(self) -> Connection:
        address = self._address
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._clock), address.host, address.port, ssl=address.ssl
        )
        return connection
