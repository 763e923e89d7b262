"""The sessions of a decode worker, each on the gRPC stream of its ingress."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from decode_worker.answerer import Answerer
from decode_worker.session import MAX_UNSENT_BYTES, Session
from engine.errors import EngineError
from kv_transfer.event_service import COMES_BACK_S
from protos.generation_pb2 import Failure
from protos.limits import SESSION_OPEN
from protos.session_pb2 import DecodeMessage, IngressMessage
from protos.session_pb2_grpc import SessionServicer
from protos.worker_pb2 import WorkerDescription

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    max_unsent_bytes: int = MAX_UNSENT_BYTES
    greeting_s: float = 5.0  # until its hello
    # An ingress that answers pings and reads nothing for so long is stuck.
    max_stall_s: float = 10.0


class SessionService(SessionServicer):
    """Opens a session for every stream, and closes it with the stream, however that ends."""

    def __init__(
        self,
        answerer: Answerer,
        description: WorkerDescription,
        limits: SessionLimits | None = None,
    ) -> None:
        self._answerer = answerer
        self._description = description
        self._limits = limits or SessionLimits()
        self._numbers = count(1)
        self._sessions: set[Session] = set()
        self._draining = self._asks_to_move = False
        self._left_at = -math.inf

    @property
    def num_requests(self) -> int:
        return sum(session.num_requests for session in self._sessions)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def is_left(self) -> bool:
        """No ingress has a session here, nor may open it again."""
        gone_s = asyncio.get_running_loop().time() - self._left_at
        return not self._sessions and gone_s >= COMES_BACK_S

    def drain(self) -> None:
        """No new request and no new session; each session ends when it is idle."""
        self._draining = True
        for session in self._sessions:
            session.drain()

    def ask_to_move(self) -> None:
        """Sessions that open later as well."""
        self._asks_to_move = True
        for session in self._sessions:
            session.ask_to_move()

    def fail_requests(self, error: EngineError) -> None:
        for session in self._sessions:
            session.fail_requests(error)

    async def Open(  # type: ignore[override]  # writes, to see what becomes of it
        self,
        request_iterator: AsyncIterator[IngressMessage],
        context: grpc.aio.ServicerContext[IngressMessage, DecodeMessage],
    ) -> None:
        await context.send_initial_metadata((SESSION_OPEN,))
        number = next(self._numbers)
        session = Session(
            f"{number}/", self._answerer, self._description, self._limits.max_unsent_bytes
        )
        self._sessions.add(session)
        if self._draining:
            session.drain()
        if self._asks_to_move:
            session.ask_to_move()
        loop = asyncio.get_running_loop()
        greeting = loop.call_later(self._limits.greeting_s, session.end_greeting)
        receiver = asyncio.create_task(self._receive(session, request_iterator))
        try:
            while messages := await session.next_messages():
                for message in messages:
                    with self._watching(session):
                        await context.write(message)
        except grpc.aio.InternalError:
            logger.info("a session's stream broke while it was written to")
        finally:
            receiver.cancel()
            greeting.cancel()
            session.close()
            self._sessions.discard(session)
            self._left_at = asyncio.get_running_loop().time()

    @contextmanager
    def _watching(self, session: Session) -> Iterator[None]:
        """A message that is not taken in time ends the session's requests. The stream itself
        waits on, for its reader or for the connection's end: gRPC does not let go of a message
        that it has begun to send."""
        stall_s = self._limits.max_stall_s
        message = f"the session was not read for {stall_s:g} s"
        failure = Failure(kind=Failure.KIND_BUSY, message=message)
        timer = asyncio.get_running_loop().call_later(stall_s, session.fail, failure)
        try:
            yield
        finally:
            timer.cancel()

    async def _receive(self, session: Session, messages: AsyncIterator[IngressMessage]) -> None:
        try:
            async for message in messages:
                session.receive(message)
        except DecodeError:
            logger.warning("a session ends: what came is no message")
            failure = Failure(kind=Failure.KIND_INVALID, field="message", message="unreadable")
            session.fail(failure)
        except grpc.aio.BaseError as error:
            logger.info("a session's stream broke while it was read: %s", error)
            session.close()
        except Exception as error:  # noqa: BLE001 - a bug of ours: whoever waits is told
            logger.exception("a session failed")
            failure = Failure(kind=Failure.KIND_INTERNAL, message=f"the session failed: {error!r}")
            session.fail(failure)
        else:
            session.finish()
