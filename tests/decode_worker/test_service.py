"""Sessions over real streams, spoken to in raw messages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from decode_worker.answerer import SubmittedRequest, encode_submit
from decode_worker.service import SessionLimits, SessionService
from engine.request import ChoiceDelta, FinishReason, GenerationRequest, PromptReport, RequestId
from engine.sampling import SamplingParams
from engine.step import TokenLogprobs
from engine.wire.reading import NewsReader
from protos.generation_pb2 import Failure
from protos.limits import PROTOCOL
from protos.rpc import Plane
from protos.session_pb2 import Cancel, DecodeMessage, Hello, IngressMessage
from protos.session_pb2_grpc import SessionStub
from tests.decode_worker.fakes import (
    DESCRIPTION,
    CountingAnswerer,
    PushedAnswerer,
    session_server,
)
from tests.waiting import until

HELLO = IngressMessage(hello=Hello(protocol=PROTOCOL))
Call = grpc.aio.StreamStreamCall[IngressMessage, DecodeMessage]


def submit(name: str, **params: Any) -> IngressMessage:
    request = GenerationRequest(RequestId(name), [1, 2, 3], SamplingParams(**params))
    return IngressMessage(submit=encode_submit(SubmittedRequest(request)))


@pytest.fixture
async def answerer() -> PushedAnswerer:
    return PushedAnswerer()


@pytest.fixture
async def service(answerer: PushedAnswerer) -> SessionService:
    return SessionService(answerer, DESCRIPTION)


@pytest.fixture
async def channel(service: SessionService) -> AsyncIterator[grpc.aio.Channel]:
    async with session_server(service) as address, Plane().channel(address) as channel:
        yield channel


async def open_session(channel: grpc.aio.Channel) -> Call:
    call = SessionStub(channel).Open(timeout=30)
    await call.write(HELLO)
    assert (await read(call)).welcome == DESCRIPTION
    return call


def read_raw(data: bytes) -> DecodeMessage:
    return DecodeMessage.FromString(data)


async def read(call: Call) -> DecodeMessage:
    """The next one that says more than that a request has come."""
    while True:
        message = await call.read()
        assert isinstance(message, DecodeMessage)
        if message.WhichOneof("kind") != "step" or message.step.requests:
            return message


async def test_a_request_over_the_wire(
    channel: grpc.aio.Channel, answerer: PushedAnswerer, service: SessionService
) -> None:
    call = await open_session(channel)
    await call.write(submit("r", top_p=0.5))
    await until(lambda: answerer.streams)
    stream = answerer.streams[0]
    assert stream.submitted.request.params == SamplingParams(top_p=0.5)
    stream.push(ChoiceDelta(0, [7], finish_reason=FinishReason.STOP), prompt=PromptReport(1))
    stream.end()
    (news,) = (await read(call)).step.requests
    assert (news.request_id, list(news.deltas[0].token_ids)) == ("r", [7])
    assert service.num_sessions == 1
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert service.num_sessions == 0


async def test_two_ingresses_may_use_the_same_id(
    channel: grpc.aio.Channel, answerer: PushedAnswerer
) -> None:
    calls = [await open_session(channel) for _ in range(2)]
    for call in calls:
        await call.write(submit("same"))
    await until(lambda: len(answerer.streams) == 2)
    assert len({s.submitted.request.request_id for s in answerer.streams}) == 2
    calls[0].cancel()
    await until(lambda: sum(s.closed.is_set() for s in answerer.streams) == 1)
    (left,) = (s for s in answerer.streams if not s.closed.is_set())
    left.push(ChoiceDelta(0, [3]))
    assert (await read(calls[1])).step.requests[0].deltas[0].token_ids == [3]


async def test_a_stream_that_breaks_closes_its_requests(
    channel: grpc.aio.Channel, answerer: PushedAnswerer, service: SessionService
) -> None:
    call = await open_session(channel)
    for name in "abc":
        await call.write(submit(name))
    await until(lambda: len(answerer.streams) == 3)
    call.cancel()
    async with asyncio.timeout(30):
        for stream in answerer.streams:
            await stream.closed.wait()
    await until(lambda: service.num_sessions == 0)


async def test_bytes_that_are_no_message_end_the_session_alone(
    channel: grpc.aio.Channel, answerer: PushedAnswerer
) -> None:
    good = await open_session(channel)
    raw: Any = channel.stream_stream("/kvrelay.v1.Session/Open")(timeout=10)
    await raw.write(b"\xff\xff\xff\xff")
    answer = await raw.read()
    assert isinstance(answer, bytes)
    failure = DecodeMessage.FromString(answer).failure
    assert failure.kind == Failure.KIND_INVALID
    assert await raw.read() is grpc.aio.EOF
    await good.write(submit("r"))
    await until(lambda: answerer.streams)


async def test_failures_end_the_stream_in_order(channel: grpc.aio.Channel) -> None:
    call = SessionStub(channel).Open(timeout=10)
    await call.write(IngressMessage(cancel=Cancel(request_id="x")))
    assert (await read(call)).failure.kind == Failure.KIND_INVALID
    assert await call.read() is grpc.aio.EOF


async def test_draining(
    channel: grpc.aio.Channel, answerer: PushedAnswerer, service: SessionService
) -> None:
    idle, busy = await open_session(channel), await open_session(channel)
    await busy.write(submit("old"))
    await until(lambda: answerer.streams)
    service.drain()
    assert (await read(idle)).failure.kind == Failure.KIND_UNAVAILABLE
    assert (await read(busy)).HasField("leaving")
    await busy.write(submit("new"))
    (news,) = (await read(busy)).step.requests
    assert (news.request_id, news.failure.kind) == ("new", Failure.KIND_UNAVAILABLE)
    late = SessionStub(channel).Open(timeout=10)
    await late.write(HELLO)
    assert (await read(late)).failure.kind == Failure.KIND_UNAVAILABLE
    assert service.num_requests == 1
    answerer.streams[0].end()
    assert (await read(busy)).failure.kind == Failure.KIND_UNAVAILABLE
    await until(lambda: service.num_sessions == 0)


async def test_a_prompts_report_of_many_messages(
    channel: grpc.aio.Channel, answerer: PushedAnswerer
) -> None:
    """More than any one message may hold."""
    call = await open_session(channel)
    await call.write(submit("r"))
    await until(lambda: answerer.streams)
    top = tuple((i, -float(i)) for i in range(20))
    entries = [None, *(TokenLogprobs(i, -1.0, 1, top) for i in range(20_000))]
    answerer.streams[0].push(ChoiceDelta(0, [1]), prompt=PromptReport(0, entries))
    reader, prompt, num_messages = NewsReader(20_001, 1), None, 0
    while prompt is None:
        num_messages += 1
        for news in (await read(call)).step.requests:
            update = reader.read(news)
            prompt = prompt or (update.prompt if update else None)
    assert num_messages > 1
    assert prompt == PromptReport(0, entries)


async def test_who_reads_nothing_is_given_up() -> None:
    """gRPC takes what its windows hold; then the session stalls, and is ended."""
    limits = SessionLimits(max_stall_s=0.2)
    service = SessionService(CountingAnswerer(), DESCRIPTION, limits)
    small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
    async with (
        session_server(service) as address,
        grpc.aio.insecure_channel(address, small) as channel,
    ):
        call = await open_session(channel)
        await call.write(submit("first"))
        await until(lambda: service.num_requests > 0)
        with suppress(grpc.aio.AioRpcError):  # it may be over before the last is written
            for number in range(50):
                await call.write(submit(str(number)))
        await until(lambda: service.num_requests == 0)
        message = await read(call)
        while message.WhichOneof("kind") == "step":
            message = await read(call)
        assert message.failure.kind == Failure.KIND_BUSY
        assert "not read for 0.2 s" in message.failure.message
        assert await call.read() is grpc.aio.EOF


async def test_what_is_no_message_ends_its_session(
    channel: grpc.aio.Channel, service: SessionService
) -> None:
    raw: Any = channel.stream_stream("/kvrelay.v1.Session/Open", response_deserializer=read_raw)
    call: Call = raw(timeout=30)
    await call.write(HELLO.SerializeToString())  # type: ignore[arg-type]
    assert (await read(call)).welcome == DESCRIPTION
    await call.write(b"\xff\xff\xff")  # type: ignore[arg-type]
    failure = (await read(call)).failure
    assert (failure.kind, failure.field) == (Failure.KIND_INVALID, "message")
    await until(lambda: service.num_sessions == 0)


async def test_a_bug_of_ours_is_told_as_one(
    channel: grpc.aio.Channel,
    answerer: PushedAnswerer,
    service: SessionService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(answerer, "submit", None)
    call = await open_session(channel)
    await call.write(submit("r"))
    failure = (await read(call)).failure
    assert failure.kind == Failure.KIND_INTERNAL
    assert "TypeError" in failure.message
    await until(lambda: service.num_sessions == 0)
    assert any(record.exc_info for record in caplog.records), "with its traceback"


async def test_a_session_without_a_hello_ends(answerer: PushedAnswerer) -> None:
    service = SessionService(answerer, DESCRIPTION, SessionLimits(greeting_s=0.05))
    async with session_server(service) as address, Plane().channel(address) as channel:
        silent = SessionStub(channel).Open(timeout=30)
        failure = (await read(silent)).failure
        assert (failure.kind, failure.field) == (Failure.KIND_INVALID, "hello")
        assert await silent.read() is grpc.aio.EOF
        await until(lambda: service.num_sessions == 0)
