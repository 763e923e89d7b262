"""A decode worker as a backend: real engine, real streams, real faults."""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from cluster.session import FIRST_RETRY_S, LAST_RETRY_S, SessionBackend, SessionBroken
from cluster.session_stream import SessionStream
from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route
from decode_worker.service import SessionService
from decode_worker.session import Session
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.describe_worker import describe_worker
from engine.engine import Engine
from engine.errors import QueueFullError, RequestError, StepError, UnavailableError
from engine.generation_stream import GenerationStream
from engine.request import (
    ChoiceDelta,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptReport,
    RequestId,
)
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from protos.generation_pb2 import Failure
from protos.port import reserved_port
from protos.rpc import Plane
from protos.secret import Secret
from protos.session_pb2 import DecodeMessage, IngressMessage
from protos.session_pb2_grpc import SessionStub
from protos.worker_pb2 import ROLE_DECODE, WorkerDescription
from tests.decode_worker.fakes import DESCRIPTION, PushedAnswerer, session_server
from tests.decode_worker.local import LocalAnswerer
from tests.engine.models_on_disk import make_tiny
from tests.engine.test_async_engine import idle
from tests.processes import python
from tests.waiting import until

NOTICED_S = 4.0  # a second until a ping, another for its answer, and two of a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048).folder


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        kv_cache_memory_bytes=4 << 20,
        max_num_seqs=8,
        num_threads=1,
    )
    engine = AsyncEngine(Engine.create(config))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def port() -> Iterator[int]:
    """That nobody else gets while no worker listens there."""
    with reserved_port("127.0.0.1") as port:
        yield port


@asynccontextmanager
async def session_with(
    service: SessionService, plane: Plane | None = None
) -> AsyncIterator[SessionBackend]:
    async with session_server(service, plane) as address:
        backend = SessionBackend(address, plane or Plane())
        await backend.start()
        try:
            yield backend
        finally:
            await backend.stop()


@pytest.fixture
async def backend(engine: AsyncEngine) -> AsyncIterator[SessionBackend]:
    description = describe_worker(engine.engine.info, ROLE_DECODE, "tests", 1, 8)
    service = SessionService(LocalAnswerer(engine), description)
    async with session_with(service) as backend:
        yield backend


@pytest.fixture
async def answerer() -> PushedAnswerer:
    return PushedAnswerer()


@pytest.fixture
async def pushed(answerer: PushedAnswerer) -> AsyncIterator[SessionBackend]:
    async with session_with(SessionService(answerer, DESCRIPTION)) as backend:
        yield backend


def request(name: str, max_tokens: int = 5, **params: Any) -> GenerationRequest:
    sampling = SamplingParams(
        temperature=0.0, ignore_eos=True, **{"max_tokens": max_tokens, **params}
    )
    return GenerationRequest(RequestId(name), [1, 2, 3], sampling)


async def read(stream: GenerationStream) -> GenerationUpdate:
    """The whole answer."""
    deltas: list[ChoiceDelta] = []
    prompt = None
    async with asyncio.timeout(30):
        async for update in stream:
            deltas += update.deltas
            prompt = prompt or update.prompt
    stream.close()
    return GenerationUpdate(deltas, prompt)


def answer(update: GenerationUpdate) -> list[tuple[int, int, object, object]]:
    """Token by token: how they were grouped says nothing."""
    flat: list[tuple[int, int, object, object]] = []
    for delta in update.deltas:
        for number, token in enumerate(delta.token_ids):
            logprobs = delta.logprobs[number] if delta.logprobs else None
            last = number == len(delta.token_ids) - 1
            flat.append((delta.choice, token, logprobs, delta.finish_reason if last else None))
    return sorted(flat, key=lambda token: token[0])


async def test_the_answer_is_the_engines_own(engine: AsyncEngine, backend: SessionBackend) -> None:
    """Logprobs to the last bit, prompt included."""
    requests = [
        request(f"r{i}", 20, n=1 + i % 3, logprobs=i, prompt_logprobs=2, seed=i) for i in range(6)
    ]
    theirs = await asyncio.gather(*(read(backend.submit(r)) for r in requests))
    ours = await asyncio.gather(*(read(engine.submit(r)) for r in requests))
    for mine, other in zip(ours, theirs, strict=True):
        assert answer(mine) == answer(other)
        assert mine.prompt is not None
        assert other.prompt is not None
        assert list(mine.prompt.logprobs or ()) == list(other.prompt.logprobs or ())
        assert len(mine.prompt.logprobs or ()) == 3
    await idle(engine)


async def test_refusals_come_from_the_stream(backend: SessionBackend) -> None:
    for wrong, field in (
        (request("a", 10_000), "max_tokens"),
        (request("b", top_k=2**40), "top_k"),
        (request("c", stop=("\ud800",)), "stop"),
        (request("x" * 300), "request_id"),
    ):
        with pytest.raises(RequestError) as caught:
            await read(backend.submit(wrong))
        assert caught.value.field == field
    backend.check_health()


async def test_a_prompt_beyond_any_message_is_refused_here(backend: SessionBackend) -> None:
    long = GenerationRequest(RequestId("long"), [2**31] * 900_000, SamplingParams())
    with pytest.raises(RequestError, match="prompt"):
        await read(backend.submit(long))
    assert len(answer(await read(backend.submit(request("next"))))) == 5


async def test_closing_a_stream_frees_its_blocks(
    engine: AsyncEngine, backend: SessionBackend
) -> None:
    stream = backend.submit(request("long", 2000))
    await anext(stream)
    stream.close()
    stream.close()
    await idle(engine)
    async for _ in stream:
        pass


async def test_stopped_choices(engine: AsyncEngine, backend: SessionBackend) -> None:
    stream = backend.submit(request("two", 2000, n=2))
    await anext(stream)
    stream.stop_choice(0)
    stream.stop_choice(0)
    await anext(stream)
    stream.stop_choice(1)
    async with asyncio.timeout(30):
        async for _ in stream:
            pass
    await idle(engine)


async def test_a_running_id_is_refused_before_it_breaks_the_session(
    pushed: SessionBackend, answerer: PushedAnswerer
) -> None:
    first = pushed.submit(request("same"))
    with pytest.raises(RequestError, match="request_id"):
        await read(pushed.submit(request("same")))
    await until(lambda: answerer.streams)
    answerer.streams[0].push(ChoiceDelta(0, [4], finish_reason=FinishReason.STOP))
    assert answer(await read(first)) == [(0, 4, None, FinishReason.STOP)]


async def test_what_was_on_its_way_is_not_of_the_same_id_asked_again(
    pushed: SessionBackend, answerer: PushedAnswerer
) -> None:
    """A request that was taken elsewhere and comes back at once."""
    first = pushed.submit(request("same"))
    await until(lambda: answerer.streams)
    answerer.streams[0].push(ChoiceDelta(0, [4]))
    first.give_up(UnavailableError("the worker is leaving"))
    again = pushed.submit(request("same"))
    await until(lambda: len(answerer.streams) == 2)
    answerer.streams[1].push(ChoiceDelta(0, [5], finish_reason=FinishReason.STOP))
    assert answer(await read(again)) == [(0, 5, None, FinishReason.STOP)]


async def test_errors_of_the_worker_are_the_streams(
    pushed: SessionBackend, answerer: PushedAnswerer
) -> None:
    errors = [QueueFullError("4096 wait"), StepError("no more memory"), RequestError("n", "9")]
    streams = [pushed.submit(request(str(i))) for i in range(3)]
    await until(lambda: len(answerer.streams) == 3)
    answerer.streams[0].push(ChoiceDelta(0, [1]))
    for pushing, error in zip(answerer.streams, errors, strict=True):
        pushing.fail(error)
    assert list((await anext(streams[0])).deltas[0].token_ids) == [1], "what came is read first"
    for stream, error in zip(streams, errors, strict=True):
        with pytest.raises(type(error)) as caught:
            await read(stream)
        assert str(caught.value) == str(error)


class Listening(SessionService):
    """Counts the messages of its sessions."""

    num_messages = 0

    async def _receive(self, session: Session, messages: AsyncIterator[IngressMessage]) -> None:
        async def counted() -> AsyncIterator[IngressMessage]:
            async for message in messages:
                self.num_messages += 1
                yield message

        await super()._receive(session, counted())


async def test_what_is_asked_at_once_goes_together(answerer: PushedAnswerer) -> None:
    """In order, but for what is large, as messages are bounded."""
    service = Listening(answerer, DESCRIPTION)
    async with session_with(service) as backend:
        streams = [backend.submit(request(f"{i}")) for i in range(100)]
        streams[3].close()
        long = replace(request("long"), prompt_token_ids=list(range(1 << 20)))
        streams += [backend.submit(replace(long, request_id=RequestId(f"l{i}"))) for i in range(3)]
        await until(lambda: len(answerer.streams) == 103)
        names = [one.submitted.request.request_id.rpartition("/")[2] for one in answerer.streams]
        assert names == [*map(str, range(100)), "l0", "l1", "l2"]
        assert answerer.streams[3].closed.is_set()
        assert service.num_messages <= 1 + 7 + 3
        for stream in streams:
            stream.close()


async def test_what_is_small_goes_with_nothing_large(answerer: PushedAnswerer) -> None:
    """As one message they could be larger than any may be."""
    service = Listening(answerer, DESCRIPTION)
    async with session_with(service) as backend:
        long = replace(request("long"), prompt_token_ids=[1] * (1 << 17))
        streams = [backend.submit(one) for one in (long, request("a"), request("b"))]
        await until(lambda: len(answerer.streams) == 3)
        assert service.num_messages == 3, "the greeting, the long one and both others"
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("asks", [("drain", "ask_to_move"), ("ask_to_move", "drain")])
async def test_what_a_worker_asks_for_holds_until_the_session_s_end(
    answerer: PushedAnswerer, asks: tuple[str, str]
) -> None:
    service = SessionService(answerer, DESCRIPTION)
    async with session_with(service) as backend:
        stream = backend.submit(request("a"))
        await until(lambda: answerer.streams)
        (session,) = service._sessions
        for ask in asks:
            getattr(session, ask)()
            asked = {"drain": "leaving"}.get(ask, "wants_move")
            await until(partial(getattr, backend, asked))
        assert backend.leaving
        assert backend.wants_move
        answerer.streams[0].push(ChoiceDelta(0, [4], finish_reason=FinishReason.STOP))
        answerer.streams[0].end()
        assert len(answer(await read(stream))) == 1
        await until(lambda: backend.is_open and not backend.is_left)


async def test_routes_reach_the_worker(pushed: SessionBackend, answerer: PushedAnswerer) -> None:
    route = Route((PrefillCandidate("p1:9000", 7),), local_prefill=LocalPrefill.NEVER)
    pushed.submit(request("a"), route)
    pushed.submit(request("b"))
    await until(lambda: len(answerer.streams) == 2)
    assert [s.submitted.route for s in answerer.streams] == [route, Route()]


async def test_never_here_is_refused_by_a_worker_that_can_only_here(
    backend: SessionBackend,
) -> None:
    route = Route(local_prefill=LocalPrefill.NEVER)
    with pytest.raises(UnavailableError, match="every prompt itself"):
        await read(backend.submit(request("a"), route))


async def test_a_slow_client_holds_nobody_up(backend: SessionBackend, engine: AsyncEngine) -> None:
    slow = backend.submit(request("slow", 200))
    assert len(answer(await read(backend.submit(request("quick", 200))))) == 200
    await idle(engine)
    await until(lambda: not backend._streams)
    update = await anext(slow)
    assert sum(len(delta.token_ids) for delta in update.deltas) == 200


async def test_the_prompt_s_report_is_read_with_what_came_after_it(
    pushed: SessionBackend, answerer: PushedAnswerer
) -> None:
    stream = pushed.submit(request("slow"))
    await until(lambda: answerer.streams)
    answerer.streams[0].push(ChoiceDelta(0, [4]), prompt=PromptReport(2))
    await until(lambda: stream._deltas)
    answerer.streams[0].push(ChoiceDelta(0, [5], finish_reason=FinishReason.STOP))
    await until(lambda: not pushed._streams)
    update = await anext(stream)
    assert update.prompt is not None
    assert update.prompt.num_cached_tokens == 2


async def test_the_prompt_s_report_waits_for_no_token(
    pushed: SessionBackend, answerer: PushedAnswerer
) -> None:
    stream = pushed.submit(request("long"))
    await until(lambda: answerer.streams)
    answerer.streams[0].push(prompt=PromptReport(2))
    async with asyncio.timeout(30):
        assert (await anext(stream)).prompt is not None


class Silent(SessionService):
    async def _receive(self, session: Session, messages: AsyncIterator[IngressMessage]) -> None:
        await asyncio.Event().wait()


class Mute(SessionService):
    async def _receive(self, session: Session, messages: AsyncIterator[IngressMessage]) -> None:
        session.finish()


class LateCall:
    """Whose beginning is heard of when more has come."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def initial_metadata(self) -> Any:
        metadata = await self._call.initial_metadata()
        await asyncio.sleep(0.05)
        return metadata


class HeldCall(LateCall):
    """That sends no requests."""

    async def write(self, message: IngressMessage) -> None:
        if message.HasField("submit"):
            await asyncio.Event().wait()
        await self._call.write(message)


class TestConnecting:
    async def test_nobody_there(self) -> None:
        async with session_server(SessionService(PushedAnswerer(), DESCRIPTION)) as address:
            pass
        backend = SessionBackend(address, Plane())
        started = time.monotonic()
        with pytest.raises(UnavailableError, match=address):
            await backend.start()
        assert time.monotonic() - started < NOTICED_S
        assert backend._task is not None
        assert backend._task.done(), "nobody goes on trying"
        with pytest.raises(UnavailableError):
            await read(backend.submit(request("r")))

    async def test_wrong_secret(self) -> None:
        service = SessionService(PushedAnswerer(), DESCRIPTION)
        async with session_server(service, Plane(Secret(b"x" * 16))) as address:
            for plane in (Plane(), Plane(Secret(b"y" * 16))):
                backend = SessionBackend(address, plane)
                with pytest.raises(UnavailableError, match="secret"):
                    await backend.start()

    async def test_another_model_than_expected(self) -> None:
        service = SessionService(PushedAnswerer(), DESCRIPTION)
        async with session_server(service) as address:
            right = SessionBackend(address, Plane(), DESCRIPTION.format.fingerprint)
            assert await right.start() == DESCRIPTION
            await right.stop()
            wrong = SessionBackend(address, Plane(), "hub:other")
            with pytest.raises(UnavailableError, match="fingerprint"):
                await wrong.start()

    async def test_one_that_takes_no_sessions(self) -> None:
        server = Plane().server()
        address = Plane().listen(server, "127.0.0.1:0")
        await server.start()
        backend = SessionBackend(address, Plane())
        with pytest.raises(UnavailableError, match="a prefill worker takes no sessions"):
            await backend.start()
        await server.stop(None)

    async def test_one_of_another_version(self) -> None:
        other = WorkerDescription.FromString(DESCRIPTION.SerializeToString())
        other.protocol += 1
        async with session_server(SessionService(PushedAnswerer(), other)) as address:
            with pytest.raises(UnavailableError, match="no decode worker of this version"):
                await SessionBackend(address, Plane()).start()

    async def test_one_that_says_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cluster.session.WELCOME_TIMEOUT_S", 0.1)
        async with session_server(Silent(PushedAnswerer(), DESCRIPTION)) as address:
            with pytest.raises(UnavailableError, match="no answer within"):
                await SessionBackend(address, Plane()).start()

    async def test_one_that_hangs_up_without_a_word(self) -> None:
        async with session_server(Mute(PushedAnswerer(), DESCRIPTION)) as address:
            with pytest.raises(UnavailableError, match="the worker hung up$"):
                await SessionBackend(address, Plane()).start()

    async def test_one_that_refuses_before_it_is_greeted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is draining: its refusal, and the stream's end, may be here before the hello goes."""

        def stub(channel: grpc.aio.Channel) -> SimpleNamespace:
            return SimpleNamespace(Open=lambda: LateCall(SessionStub(channel).Open()))

        monkeypatch.setattr("cluster.session.SessionStub", stub)
        service = SessionService(PushedAnswerer(), DESCRIPTION)
        service.drain()
        async with session_server(service) as address:
            with pytest.raises(UnavailableError, match="the worker is draining"):
                await SessionBackend(address, Plane()).start()

    async def test_another_model_where_one_was(self, port: int) -> None:
        """Its tokens would be read as the first one's."""
        address, other = f"127.0.0.1:{port}", WorkerDescription()
        async with session_server(SessionService(PushedAnswerer(), DESCRIPTION), address=address):
            backend = SessionBackend(address, Plane())
            await backend.start()
        other.CopyFrom(DESCRIPTION)
        other.format.fingerprint = "hub:other"
        async with session_server(SessionService(PushedAnswerer(), other), address=address):
            await until(lambda: "fingerprint" in str(backend._problem))
            with pytest.raises(UnavailableError, match="no decode worker answers"):
                backend.check_health()
            await backend.stop()


async def test_a_session_that_is_stopped_ends_what_is_under_way(pushed: SessionBackend) -> None:
    stream = pushed.submit(request("long"))
    await pushed.stop()
    with pytest.raises(SessionBroken) as caught:
        await read(stream)
    assert caught.value.detail == "the session is closed"


async def test_a_worker_that_breaks_the_rules_is_left(
    pushed: SessionBackend, answerer: PushedAnswerer
) -> None:
    """It answers a choice that was not asked for: nothing of this session can be trusted."""
    streams = [pushed.submit(request(name)) for name in "ab"]
    await until(lambda: len(answerer.streams) == 2)
    answerer.streams[0].push(ChoiceDelta(5, [1]))
    for stream in streams:
        with pytest.raises(SessionBroken) as caught:
            await read(stream)
        assert "choice" in caught.value.detail
    await until(lambda: all(stream.closed.is_set() for stream in answerer.streams))


async def test_a_worker_that_greets_twice_is_left(answerer: PushedAnswerer) -> None:
    service = SessionService(answerer, DESCRIPTION)
    async with session_with(service) as backend:
        stream = backend.submit(request("a"))
        await until(lambda: answerer.streams)
        (session,) = service._sessions
        session._messages.append(DecodeMessage(welcome=DESCRIPTION))
        session._news.set()
        with pytest.raises(SessionBroken) as caught:
            await read(stream)
        assert caught.value.detail.endswith("kind: welcome in the middle of a session")


class TestFaults:
    async def test_a_worker_that_goes_is_found_again(
        self, caplog: pytest.LogCaptureFixture, port: int
    ) -> None:
        """Where it was, and what gRPC says of it, is in the log alone."""
        caplog.set_level("INFO")
        answerer = PushedAnswerer()
        address = f"127.0.0.1:{port}"
        async with session_server(SessionService(answerer, DESCRIPTION), address=address):
            backend = SessionBackend(address, Plane())
            await backend.start()
            stream = backend.submit(request("a"))
            await until(lambda: answerer.streams)
        with pytest.raises(SessionBroken, match="^the decode worker is gone$") as caught:
            await read(stream)
        assert caught.value.detail.startswith(f"{address}: ")
        with pytest.raises(UnavailableError, match="^no decode worker answers$"):
            backend.check_health()
        with pytest.raises(UnavailableError, match="^no decode worker answers$"):
            await read(backend.submit(request("b")))
        assert f"the session with {address} broke under 1 requests: " in caplog.text
        await until(lambda: f"no session with {address}: UNAVAILABLE" in caplog.text)
        service = SessionService(answerer, DESCRIPTION)
        async with session_server(service, address=address):
            await until(lambda: backend._problem is None)
            stream = backend.submit(request("a"))
            await until(lambda: len(answerer.streams) == 2)
            answerer.streams[1].push(ChoiceDelta(0, [4], finish_reason=FinishReason.STOP))
            assert len(answer(await read(stream))) == 1
            await backend.stop()

    async def test_a_session_that_was_long_in_coming_is_soon_back_when_it_breaks(
        self, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pauses: list[float] = []
        sleep = asyncio.sleep

        async def noted(seconds: float) -> None:
            if seconds >= FIRST_RETRY_S:
                pauses.append(seconds)
            await sleep(min(seconds, 0.001))

        monkeypatch.setattr(asyncio, "sleep", noted)
        address, service = f"127.0.0.1:{port}", SessionService(PushedAnswerer(), DESCRIPTION)
        backend = SessionBackend(address, Plane())
        backend.open()
        await until(lambda: LAST_RETRY_S in pauses)
        async with session_server(service, address=address):
            await until(lambda: backend.is_open)
            pauses.clear()
            for session in service._sessions:
                session.fail(Failure(kind=Failure.KIND_BUSY, message="the session was not read"))
            await until(lambda: pauses)
            assert pauses[0] == FIRST_RETRY_S
            await backend.stop()

    async def test_what_was_to_be_asked_is_not_asked_in_the_next_session(
        self, answerer: PushedAnswerer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[Any] = []

        def open_call(channel: grpc.aio.Channel) -> Any:
            calls.append(SessionStub(channel).Open())
            return calls[-1] if calls[1:] else HeldCall(calls[-1])

        def stub(channel: grpc.aio.Channel) -> SimpleNamespace:
            return SimpleNamespace(Open=lambda: open_call(channel))

        monkeypatch.setattr("cluster.session.SessionStub", stub)
        service = SessionService(answerer, DESCRIPTION)
        async with session_with(service) as backend:
            streams = [backend.submit(request("a"))]
            await until(lambda: not backend._outgoing)
            streams.append(backend.submit(request("b")))
            for session in service._sessions:
                session.fail(Failure(kind=Failure.KIND_BUSY, message="the session was not read"))
            for stream in streams:
                with pytest.raises(SessionBroken):
                    await read(stream)
            await until(lambda: backend.is_open)
            backend.submit(request("c"))
            await until(lambda: answerer.streams)
            names = [one.submitted.request.request_id for one in answerer.streams]
            assert [name.rpartition("/")[2] for name in names] == ["c"]

    async def test_why_a_worker_was_never_reached_is_told_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """In the log of whoever goes on trying; else by what is raised alone."""
        caplog.set_level("INFO", "kvrelay")  # as commands and replicas set it
        answerer, secret = PushedAnswerer(), Plane(secret=Secret(b"sixteen or more characters"))
        async with session_server(SessionService(answerer, DESCRIPTION), secret) as address:
            with pytest.raises(UnavailableError, match="secret: the cluster secret is missing"):
                await SessionBackend(address, Plane()).start()
            assert not caplog.messages
            num_tries = 0

            def tried() -> None:
                nonlocal num_tries
                num_tries += 1

            backend = SessionBackend(address, Plane(), changed=tried)
            backend.open()
            await until(lambda: num_tries == 2)
            await backend.stop()
        reason = "secret: the cluster secret is missing or wrong"
        assert caplog.messages == [f"no session with {address}: {reason}"]

    @pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
    async def test_a_worker_that_is_gone_is_noticed(self, number: signal.Signals) -> None:
        source = "from tests.decode_worker.fakes import *; asyncio.run(count_for_ever())"
        async with python("-c", source) as (child, address):
            backend = SessionBackend(address, Plane())
            await backend.start()
            streams = [backend.submit(request(name, 2**31)) for name in "abc"]
            for stream in streams:
                await anext(stream)
            child.send_signal(number)
            started = time.monotonic()
            for stream in streams:
                with pytest.raises(SessionBroken, match="^the decode worker is gone$"):
                    await to_the_end(stream)
            assert time.monotonic() - started < NOTICED_S
            await backend.stop()

    async def test_a_killed_ingress_frees_its_blocks(
        self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        description = describe_worker(engine.engine.info, ROLE_DECODE, "tests", 1, 8)
        service = SessionService(LocalAnswerer(engine), description)
        step, num_shared, go_on = engine.engine.step, 0, threading.Event()

        def held() -> StepOutput:
            """Once each of the three has tokens: none is to end by itself."""
            nonlocal num_shared
            num_shared += engine.engine.figures().num_running == 3
            assert num_shared < 4 or go_on.wait(60)
            return step()

        monkeypatch.setattr(engine.engine, "step", held)
        async with (
            session_server(service) as address,
            python("-c", INGRESS, address) as (child, line),
        ):
            assert line == "answers"
            assert service.num_requests == 3
            child.kill()
            await until(lambda: not service.num_requests)
            go_on.set()
            await idle(engine)


INGRESS = """
import asyncio, sys
from cluster.session import SessionBackend, SessionBroken
from engine.request import GenerationRequest
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from protos.rpc import Plane

async def main():
    backend = SessionBackend(sys.argv[1], Plane())
    await backend.start()
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    streams = [backend.submit(GenerationRequest(name, [1, 2, 3], params)) for name in "abc"]
    for stream in streams:
        await anext(stream)
    print("answers", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def to_the_end(stream: SessionStream) -> None:
    async for _ in stream:
        pass
