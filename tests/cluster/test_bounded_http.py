"""Who sends half a header, or one without an end, on a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from cluster import bounded_http
from cluster.bounded_http import BoundedHttp
from cluster.http import build_app
from cluster.metrics.server import MetricsServer
from tests.cluster.fakes import FakeBackend, small_model

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def connected() -> AsyncIterator[Connection]:
    app, _ = build_app(FakeBackend(), small_model())
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, http=BoundedHttp))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Until the server closes the connection, which it must do by itself."""
    with suppress(ConnectionResetError):
        return await in_time(reader.read())
    return b""


async def in_time(waited_for: Awaitable[bytes]) -> bytes:
    async with asyncio.timeout(30):
        return await waited_for


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX: "])
async def test_half_a_header_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(bounded_http, "HEADER_TIMEOUT_S", 0.2)
    async with connected() as (reader, writer):
        writer.write(begun)
        assert await rest(reader) == b""


async def test_neither_is_half_of_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEADER_TIMEOUT_S", 1.0)
    async with connected() as (reader, writer):
        writer.write(WHOLE)
        assert b'{"status":"ok"}' in await in_time(reader.readuntil(b"}"))
        writer.write(WHOLE[:20])
        assert await rest(reader) == b""


async def test_a_header_has_a_bound() -> None:
    async with connected() as (reader, writer):
        writer.write(WHOLE[:-2] + b"X: " + b"a" * (2 * bounded_http.MAX_HEADER_BYTES))
        assert await rest(reader) == b""


async def test_a_body_is_no_header() -> None:
    body = b'{"prompt": "%s"}' % (b"a" * (4 * bounded_http.MAX_HEADER_BYTES))
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(head + body)
            assert (await in_time(reader.readuntil(b"\r\n"))).startswith(b"HTTP/1.1 400")
            assert b"context_length_exceeded" in await in_time(reader.readuntil(b"}}"))


async def test_a_page_of_metrics_is_had_in_spite_of_who_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes so many connections and no more."""
    monkeypatch.setattr(bounded_http, "HEADER_TIMEOUT_S", 0.2)
    server = MetricsServer(lambda: b"")
    host, port = (await server.start("127.0.0.1")).split(":")
    reader, writer = await asyncio.wait_for(_connect(host, int(port)), 30)
    assert await rest(reader) == b""
    writer.close()
    await server.stop()


async def _connect(host: str, port: int) -> Connection:
    while True:
        try:
            return await asyncio.open_connection(host, port)
        except ConnectionRefusedError:  # it listens a moment after it has begun
            await asyncio.sleep(0.01)
