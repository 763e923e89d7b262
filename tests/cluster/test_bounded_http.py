"""Who sends half a header, or one without an end, on a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import uvicorn
from ray.serve._private.utils import call_function_from_import_path
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster import bounded_http
from cluster.bounded_http import BoundedHttp, ReadHttp, ReplicaHttp
from cluster.http import build_app
from cluster.metrics.server import MetricsServer
from cluster.ray_cluster import PROXY_SETTINGS
from engine.request import GenerationRequest
from tests.cluster.fakes import FakeBackend, Step, say, small_model

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def connected(
    backend: FakeBackend | None = None,
    http: type[BoundedHttp] = BoundedHttp,
    app: ASGIApp | None = None,
) -> AsyncIterator[Connection]:
    if app is None:
        app, _ = build_app(backend or FakeBackend(), small_model())
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, http=http))
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
    """Until the server closes the connection, which it must do by itself: by a reset where it had
    not read all that was sent, and then what it said before counts, too."""
    read = b""
    with suppress(ConnectionResetError, BrokenPipeError):
        while part := await in_time(reader.read(1 << 16)):
            read += part
    return read


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
    async with connected() as (reader, writer):
        writer.write(WHOLE)
        assert b'{"status":"ok"}' in await in_time(reader.readuntil(b"}"))
        monkeypatch.setattr(bounded_http, "HEADER_TIMEOUT_S", 0.2)
        writer.write(WHOLE[:20])
        assert await rest(reader) == b""


async def test_a_header_has_a_bound() -> None:
    async with connected() as (reader, writer):
        writer.write(WHOLE[:-2] + b"X: " + b"a" * (2 * bounded_http.MAX_HEADER_BYTES))
        assert await rest(reader) == b""


@pytest.mark.parametrize("where", ["path", "value", "many"])
async def test_neither_may_one_be_longer_that_comes_whole(where: str) -> None:
    size = bounded_http.MAX_HEADER_BYTES + 1
    requests = {
        "path": WHOLE.replace(b"/health", b"/health?" + b"a" * size),
        "value": WHOLE[:-2] + b"X: " + b"a" * size + b"\r\n\r\n",
        "many": WHOLE[:-2] + b"X: aaaaaaaa\r\n" * (size // 9 + 1) + b"\r\n",
    }
    async with connected() as (reader, writer):
        writer.write(requests[where])
        assert (await rest(reader)).startswith(b"HTTP/1.1 400 ")


async def test_a_body_is_no_header() -> None:
    body = b'{"prompt": "%s"}' % (b"a" * (4 * bounded_http.MAX_HEADER_BYTES))
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(head + body)
            assert (await in_time(reader.readuntil(b"\r\n"))).startswith(b"HTTP/1.1 400")
            assert b"context_length_exceeded" in await in_time(reader.readuntil(b"}}"))


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize("line", [b"X: " + b"a" * 997, b"X: a\r\n" * 200])
@pytest.mark.parametrize("ended", [b"", b"\r\n"])
async def test_what_follows_a_body_has_a_bound(line: bytes, ended: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(CHUNKED + b'\r\ne\r\n{"prompt": "a"\r\n0\r\n')
        for _ in range(1000):
            writer.write(line + ended)
        assert await rest(reader) == b""


async def test_trailers_are_no_headers() -> None:
    body = b'f\r\n{"prompt": "a"}\r\n0\r\nX-Request-Timeout: never\r\n\r\n'
    async with connected() as (reader, writer):
        writer.write(CHUNKED + b"\r\n" + body)
        assert (await in_time(reader.readuntil(b"\r\n"))).startswith(b"HTTP/1.1 200")


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAA\r\n\r\n"
BODY = b'{"prompt": "a"}'
WITH_LENGTH = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(BODY))


@pytest.mark.parametrize("head", [CHUNKED, WITH_LENGTH])
@pytest.mark.parametrize("cut", [0, 1, 9, 1000])
async def test_who_offers_another_protocol_is_answered_as_if_not(head: bytes, cut: int) -> None:
    """Also to what comes behind it, and not before its body is whole."""
    body = BODY if head is WITH_LENGTH else b"8\r\n" + BODY[:8] + b"\r\n7\r\n" + BODY[8:]
    body += b"" if head is WITH_LENGTH else b"\r\n0\r\n\r\n"
    behind = WHOLE[:-2] + OFFER + WHOLE.replace(b"health", b"version")
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(head + OFFER + body[:cut])
            await asyncio.sleep(0)
            writer.write(body[cut:] + behind)
            for end in (b'"count":1', b"ok", b"version"):
                assert end in await in_time(reader.readuntil(b"}"))


@pytest.mark.parametrize("body", [b"+f\r\n" + BODY, b"\xff\r\n"])
async def test_a_body_behind_such_an_offer_is_checked(body: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(CHUNKED + OFFER + body)
        assert (await rest(reader)).startswith(b"HTTP/1.1 400")


STREAM = b'{"prompt": "a", "stream": true}'
STREAMED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
    len(STREAM),
    STREAM,
)
UPGRADE = WHOLE[:-2] + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"


@pytest.mark.parametrize("behind", [WHOLE, UPGRADE, WHOLE * 5])
async def test_who_leaves_a_stream_with_requests_behind_it(behind: bytes) -> None:
    backend = FakeBackend(endless)
    async with connected(backend) as (reader, writer):
        writer.write(STREAMED)
        await in_time(reader.readuntil(b"data: "))
        writer.write(behind)
        await asyncio.wait_for(writer.drain(), 30)
        writer.close()
        async with asyncio.timeout(30):
            await backend.streams[0].closed.wait()


async def test_answers_come_in_the_order_of_their_requests() -> None:
    other = WHOLE.replace(b"health", b"version")
    async with connected() as (reader, writer):
        writer.write((WHOLE + other) * (bounded_http.MAX_UNANSWERED // 2))
        for end in [b"ok", b"version"] * (bounded_http.MAX_UNANSWERED // 2):
            assert end in await in_time(reader.readuntil(b"}"))


async def test_what_is_wrong_behind_a_stream_is_not_told_in_it() -> None:
    long = WHOLE[:-2] + b"X: " + b"a" * bounded_http.MAX_HEADER_BYTES + b"\r\n\r\n"
    async with connected(FakeBackend(endless)) as (reader, writer):
        writer.write(STREAMED)
        await in_time(reader.readuntil(b"data: "))
        writer.write(long)
        assert b"HTTP/1.1" not in await rest(reader)


@pytest.mark.parametrize("one", [WHOLE, WHOLE[:-2] + OFFER])
async def test_requests_at_once_have_a_bound(one: bytes) -> None:
    async with connected(FakeBackend(endless)) as (reader, writer):
        writer.write(STREAMED)
        await in_time(reader.readuntil(b"data: "))
        writer.write(one * 20 * bounded_http.MAX_UNANSWERED)
        await rest(reader)


class Watched(BoundedHttp):
    """Whose writes are seen."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        WRITTEN.clear()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        seen = Mock(wraps=transport)
        seen.write.side_effect = note
        super().connection_made(seen)


WRITTEN: list[bytes] = []


def note(data: bytes) -> Any:
    WRITTEN.append(data)
    return DEFAULT  # and it is written


@pytest.mark.parametrize("path", [b"/health", b"/nowhere"])
async def test_an_answer_is_written_at_once(path: bytes) -> None:
    async with connected(http=Watched) as (reader, writer):
        for number in range(1, 4):
            writer.write(WHOLE.replace(b"/health", path))
            await in_time(reader.readuntil(b"\r\n\r\n"))
            await in_time(reader.readuntil(b"}"))
            assert len(WRITTEN) == number


async def test_the_header_of_an_answer_without_a_body_comes() -> None:
    async with connected(http=Watched) as (reader, writer):
        for _ in range(2):
            writer.write(WHOLE.replace(b"GET", b"HEAD"))
            assert b"HTTP/1.1 " in await in_time(reader.readuntil(b"\r\n\r\n"))


async def test_it_comes_to_who_says_nothing_more() -> None:
    for _ in range(5):
        async with connected() as (reader, writer):
            writer.write(WHOLE.replace(b"GET", b"HEAD"))
            writer.write_eof()
            assert b"HTTP/1.1 " in await rest(reader)


async def test_a_header_does_not_wait_for_its_body() -> None:
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"at last"})

    async with connected(http=Watched, app=slow) as (reader, writer):
        writer.write(WHOLE)
        await in_time(reader.readuntil(b"\r\n\r\n"))
        go_on.set()
        assert b"at last" in await in_time(reader.readuntil(b"0\r\n\r\n"))
        assert len(WRITTEN) == 2


async def test_a_header_whose_client_is_gone_goes_nowhere() -> None:
    """uvloop refuses to write to who is gone."""
    aborted = asyncio.Event()
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: told.append(about))

    class Seen(BoundedHttp):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            gone = Mock(wraps=transport)
            gone.write.side_effect = RuntimeError("the handler is closed")
            super().connection_made(gone)
            transports.append(gone)

    async def leaving(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        transports[0].abort()
        aborted.set()
        await receive()

    transports: list[Any] = []
    async with connected(http=Seen, app=leaving) as (reader, writer):
        writer.write(WHOLE)
        await aborted.wait()
        assert await rest(reader) == b""
    assert not told


def test_others_servers_get_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    monkeypatch.setattr(bounded_http, "HTTP_PROTOCOLS", uvicorn.config.HTTP_PROTOCOLS)
    (path,) = PROXY_SETTINGS.values()
    assert call_function_from_import_path(path) == []
    config = uvicorn.Config(lambda: None)
    config.load()
    assert config.http_protocol_class is ReplicaHttp


@pytest.mark.parametrize(
    ("brought", "seen_as"),
    [(b"mine", b"mine"), ("né".encode(), "né".encode()), (b"n\xe9", "né".encode())],
)
async def test_what_serve_reads_of_a_header_is_not_the_caller_s_to_say(
    brought: bytes, seen_as: bytes
) -> None:
    """But for an id, which it takes for UTF-8 and gives back."""
    names = (b"x-request-timeout-seconds", b"X-Session-ID", b"serve_multiplexed_model_id")
    said = b"".join(b"%b: \xff\r\n" % name for name in names)
    seen: list[tuple[bytes, bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])
        await PlainTextResponse("")(scope, receive, send)

    async with connected(app=app, http=ReplicaHttp) as (reader, writer):
        writer.write(WHOLE[:-2] + said + b"X-Request-Id: %b\r\n\r\n" % brought)
        assert (await in_time(reader.readuntil(b"\r\n"))).startswith(b"HTTP/1.1 200")
    assert seen == [(b"host", b"x"), (b"x-request-id", seen_as)]


def endless(request: GenerationRequest) -> Iterator[Step]:
    yield from list(say()(request))[:2]
    yield asyncio.Event().wait()


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


def flood(request: GenerationRequest) -> Iterator[Step]:
    """More than any socket takes unread."""
    while True:
        yield from list(say()(request))[:2]


async def test_who_stops_to_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "READ_TIMEOUT_S", 0.2)
    backend = FakeBackend(flood)
    body = b'{"prompt": "x", "stream": true, "n": 16, "logprobs": 20, "max_tokens": 200}'
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with connected(backend, ReadHttp) as (reader, writer), asyncio.timeout(30):
        writer.write(head + body)
        await reader.readexactly(1 << 20)
        await backend.streams[0].closed.wait()
