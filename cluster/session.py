"""A decode worker as a Backend: all requests of this process on one gRPC stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cluster.backend import nobody
from cluster.session_stream import SessionStream
from decode_worker.answerer import Route, SubmittedRequest, encode_submit
from engine.errors import (
    EngineError,
    QueueFullError,
    RequestError,
    StepError,
    UnavailableError,
)
from engine.request import GenerationRequest, RequestId
from engine.wire.failures import decode_failure
from protos.failures import failure_of
from protos.limits import MAX_MESSAGE_BYTES, PROTOCOL, SESSION_OPEN
from protos.rpc import Plane
from protos.session_pb2 import DecodeMessage, Hello, IngressMessage, Step
from protos.session_pb2_grpc import SessionStub
from protos.version import version
from protos.worker_pb2 import WorkerDescription
from router.workers import Leg

logger = logging.getLogger("kvrelay.session")

WELCOME_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
MAX_SUBMIT_BYTES = MAX_MESSAGE_BYTES - 1024
_MOST_MORE, _MOST_MORE_BYTES = 15, 64 << 10  # behind the first one in a message


class SessionBroken(UnavailableError):
    """The worker died under a request, or cannot be reached any more. `had_come`: the worker has
    said that the request is there, and not that this process is too slow for it."""

    def __init__(self, detail: str, had_come: bool) -> None:
        super().__init__("the decode worker is gone", detail)
        self.had_come = had_come


class SessionBackend:
    """Keeps a session open: whenever it breaks, its requests fail with SessionBroken and
    it is opened again. Used on the event loop that `open` was called on.

    `route` is of requests that bring none of their own. `changed` is called when the session
    came up, broke, or is about to end.
    """

    def __init__(
        self,
        address: str,
        plane: Plane,
        fingerprint: str = "",
        route: Route | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._plane = plane
        self._fingerprint = fingerprint
        self._route = route or Route()
        self._changed = changed
        self._channel: grpc.aio.Channel | None = None
        self._streams: dict[RequestId, SessionStream] = {}
        self._outgoing: deque[IngressMessage] = deque()
        self._to_send = asyncio.Event()
        self._problem: EngineError | None = UnavailableError("not started")
        self._tried = asyncio.Event()
        self._raises_first = False  # for who waits for the first attempt
        self._task: asyncio.Task[None] | None = None
        self.description: WorkerDescription | None = None  # of the last worker that answered
        self.num_submitted = 0  # in this session
        self.num_come = 0  # of these, as far as the worker has said
        self.leaving = False  # takes nothing new
        self.wants_move = False  # of what another worker can take

    def open(self) -> None:
        self._channel = self._plane.channel(self.address)
        self._task = asyncio.create_task(self._keep_open(self._channel))

    async def start(self) -> WorkerDescription:
        """Returns when the worker has answered; raises why it did not, on the first attempt."""
        self._raises_first = True
        self.open()
        await self._tried.wait()
        if self._problem is not None or self.description is None:
            problem = self._problem or UnavailableError("the worker hung up")
            await self.stop()
            raise problem
        return self.description

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._break(UnavailableError("the session is closed"))
        if self._channel is not None:
            await self._channel.close()

    @property
    def is_left(self) -> bool:
        """Its requests end, or go on elsewhere."""
        return self.leaving or self.wants_move

    @property
    def is_open(self) -> bool:
        return self._problem is None

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def check_health(self) -> None:
        if self._problem is not None:
            raise nobody(Leg.DECODE)

    def submit(self, request: GenerationRequest, route: Route | None = None) -> SessionStream:
        stream = SessionStream(request, self._send, self._forget)
        try:
            self.check_health()
            if request.request_id in self._streams:
                raise RequestError("request_id", f"{request.request_id!r} is running already")
            message = encode_submit(SubmittedRequest(request, route or self._route))
            if message.ByteSize() > MAX_SUBMIT_BYTES:
                raise _too_long(request)
        except EngineError as error:
            stream.fail(error)
            return stream
        self.num_submitted += 1
        stream.number = self.num_submitted
        self._streams[request.request_id] = stream
        self._send(IngressMessage(submit=message))
        return stream

    def _send(self, message: IngressMessage) -> None:
        if self._problem is None:
            self._outgoing.append(message)
            self._to_send.set()

    def _forget(self, stream: SessionStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]

    def _break(self, problem: EngineError, *, is_slow: bool = False) -> None:
        """`is_slow`: this process, as the worker says, which lives."""
        self._problem = problem
        self._outgoing.clear()
        num_come = 0 if is_slow else self.num_come
        for stream in list(self._streams.values()):
            stream.fail(SessionBroken(str(problem), stream.number <= num_come))
        self._changed()

    async def _keep_open(self, channel: grpc.aio.Channel) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                await self._hold_session(channel)
                reason: EngineError = UnavailableError("the worker hung up")
            except EngineError as error:
                reason = error
            except Exception as error:  # noqa: BLE001 - a bug of ours: whoever waits is told
                logger.exception("the session with %s failed", self.address)
                reason = UnavailableError(f"the session failed: {error!r}")
            problem = _named(self.address, reason)
            if self._problem is None:
                retry_s = FIRST_RETRY_S
                told = self.address, len(self._streams), reason
                logger.warning("the session with %s broke under %d requests: %s", *told)
            elif self._is_news(problem):
                logger.info("no session with %s: %s", self.address, reason)
            self._break(problem, is_slow=isinstance(reason, QueueFullError))
            self._tried.set()
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _is_news(self, problem: EngineError) -> bool:
        if self._tried.is_set():
            return str(problem) != str(self._problem)
        return not self._raises_first

    async def _hold_session(self, channel: grpc.aio.Channel) -> None:
        """Returns or raises an EngineError when the session has ended."""
        call = SessionStub(channel).Open()
        writer: asyncio.Task[None] | None = None
        try:
            await self._greet(call)
            writer = asyncio.create_task(self._write(call))
            while isinstance(message := await call.read(), DecodeMessage):
                self._receive(message)
        except TimeoutError as error:
            raise UnavailableError(f"no answer within {WELCOME_TIMEOUT_S:.0f} s") from error
        except (RequestError, DecodeError) as error:
            raise UnavailableError(f"what came is no answer: {error}") from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                message = "no decode worker answers there; a prefill worker takes no sessions"
                raise UnavailableError(message) from error
            raise decode_failure(failure_of(error)) from error
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()

    async def _greet(self, call: grpc.aio.StreamStreamCall[IngressMessage, DecodeMessage]) -> None:
        hello = Hello(protocol=PROTOCOL, version=version(), fingerprint=self._fingerprint)
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            # gRPC forgets why a call was refused when it is written to, so a refusal is read first.
            if SESSION_OPEN not in tuple(await call.initial_metadata() or ()):
                await call.read()
            # One that takes no session now answers at once, whether it is written to or not.
            message, _ = await asyncio.gather(call.read(), _say(call, hello))
        if not isinstance(message, DecodeMessage):
            raise UnavailableError("the worker hung up")
        if message.WhichOneof("kind") == "failure":
            raise decode_failure(message.failure)
        if message.welcome.protocol != PROTOCOL:  # of which another kind of message has none
            raise UnavailableError("what answered is no decode worker of this version")
        self.description = message.welcome
        # whoever answers at this address later answers for the same model
        self._fingerprint = message.welcome.format.fingerprint
        self._problem = None
        self.num_submitted = self.num_come = 0
        self.leaving = self.wants_move = False
        self._tried.set()
        self._changed()

    async def _write(self, call: grpc.aio.StreamStreamCall[IngressMessage, DecodeMessage]) -> None:
        """The reader learns why a stream broke; there is nothing to add here."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._outgoing:
                    await call.write(self._next_message())
                self._to_send.clear()
                await self._to_send.wait()

    def _next_message(self) -> IngressMessage:
        """And the next few, if they are small: both ends need longer for a message than for what
        most of them say."""
        message = self._outgoing.popleft()
        num_bytes = message.ByteSize()
        while self._outgoing and len(message.more) < _MOST_MORE:
            num_bytes += self._outgoing[0].ByteSize()
            if num_bytes > _MOST_MORE_BYTES:
                break
            message.more.append(self._outgoing.popleft())
        return message

    def _receive(self, message: DecodeMessage) -> None:
        self.num_come = message.num_submitted
        match message.WhichOneof("kind"):
            case "step":
                self._deliver(message.step)
            case "failure":
                raise decode_failure(message.failure)
            case "leaving":
                # One that only asks still takes what nobody else can.
                self.leaving = self.leaving or not message.leaving.move
                self.wants_move = self.wants_move or message.leaving.move
                self._changed()
            case kind:
                raise RequestError("kind", f"{kind} in the middle of a session")

    def _deliver(self, step: Step) -> None:
        for news in step.requests:
            stream = self._streams.get(RequestId(news.request_id))
            if stream is None or stream.number > self.num_come:
                continue  # was under way when the request ended here, and maybe came again
            stream.read(news)
            if news.HasField("failure"):
                stream.fail(decode_failure(news.failure))


async def _say(
    call: grpc.aio.StreamStreamCall[IngressMessage, DecodeMessage], hello: Hello
) -> None:
    """The reader learns why a stream broke, as of all that is written."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(IngressMessage(hello=hello))


def _too_long(request: GenerationRequest) -> EngineError:
    if request.sent:
        return StepError("the decode worker is gone, and what it had sent is too long for another")
    return RequestError("prompt", f"must be sent in {MAX_SUBMIT_BYTES} bytes")


def _named(address: str, error: EngineError) -> EngineError:
    return UnavailableError(f"{address}: {error}")
