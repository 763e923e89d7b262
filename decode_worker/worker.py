"""A decode worker: a node that answers sessions."""

import asyncio
import math
import time
from collections.abc import AsyncIterator

from decode_worker.fetching_answerer import FetchingAnswerer
from decode_worker.service import SessionService
from engine.errors import UnavailableError
from engine.handoff import Reservation
from prefill_worker.node import DRAIN_PERIOD_S, Node
from protos.session_pb2_grpc import add_SessionServicer_to_server
from protos.worker_pb2 import DrainProgress


class DecodeWorker(Node):
    """Fetches prompts or computes them, and answers; hands out what it has cached."""

    async def start(self) -> None:
        await super().start()
        self.answerer = FetchingAnswerer(self.engine, self.exchange.links, self.fetcher, self.cores)
        self.sessions = SessionService(self.answerer, self.description)
        add_SessionServicer_to_server(self.sessions, self.server)

    def _on_reserved(self, reservation: Reservation) -> None:
        self._faults.hold_up(self._faults.reach("worker.reserved"), self.engine.call)
        super()._on_reserved(reservation)

    def begin_drain(self) -> None:
        super().begin_drain()
        self.sessions.drain()

    async def drain(
        self,
        deadline_s: float | None,
        move_after_s: float = math.inf,
        succession_s: float = 0.0,
    ) -> AsyncIterator[DrainProgress]:
        """Until no sequence and no lease is left; what is left at the deadline fails. After
        `move_after_s` ingresses are asked to take elsewhere what another worker can take. For
        `succession_s` at most requests are still taken from the ingresses that stay: those that
        know a successor leave by themselves."""
        began = time.monotonic()
        end = math.inf if deadline_s is None else began + deadline_s
        asked_to_move = False
        while (now := time.monotonic()) < end:
            if not self.draining and (now >= began + succession_s or self.sessions.is_left()):
                self.begin_drain()
            if self.draining and not self._is_busy():
                break
            if now >= began + move_after_s and not asked_to_move:
                self.sessions.ask_to_move()
                asked_to_move = True
            yield self._progress()
            await asyncio.sleep(DRAIN_PERIOD_S)
        self.begin_drain()
        self.sessions.fail_requests(UnavailableError("the worker is draining"))
        await self._end_leases()
        yield self._progress(done=True)

    def _is_busy(self) -> bool:
        return self.sessions.num_requests > 0 or self.num_leases > 0

    def _progress(self, done: bool = False) -> DrainProgress:
        return DrainProgress(
            num_sequences=self.sessions.num_requests, num_leases=self.num_leases, done=done
        )
