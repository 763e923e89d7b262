"""Both pools as a Backend: each request waits until the router has a pair of workers for it, and
goes to another one when its worker dies or leaves, with what its client has already."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass

from cluster.backend import nobody
from cluster.pools import Pools
from cluster.relay_stream import CHECK_S, RelayStream, WorkerStuck, full
from cluster.session import SessionBackend
from decode_worker.answerer import LocalPrefill
from engine.errors import UnavailableError
from engine.request import GenerationRequest
from router.admission import Refused
from router.workers import Leg

logger = logging.getLogger("kvrelay.relay")

_TICK_S = 0.05  # while anything waits at the router
_FORGETTING = 0.98  # of how long answers are
_FIRST_GUESS = 128


@dataclass(frozen=True)
class RelayConfig:
    """`max_lost_workers`: a request that so many workers died under is the likely cause. A
    worker that did not say that the request had come may have been dead before, as when a
    whole machine goes, and one that is stuck may be so for other reasons; one such more is
    forgiven. `max_alone_s`: for a worker to come, where
    there is none, of a request that has seen one; `max_new_alone_s`: of a new one, whose client can
    ask elsewhere. `stall_s`: a worker that has made no step for so long, though it answers, loses
    its requests to others. `soonest_priority`: the lowest that a request may have."""

    local_prefill: LocalPrefill = LocalPrefill.AUTO
    max_lost_workers: int = 2
    max_alone_s: float = 30.0
    max_new_alone_s: float = 0.8
    max_candidates: int = 3
    stall_s: float = 10.0
    soonest_priority: int = 0


class Relay:
    """All streams under way, and the looks of the router at those that wait. Used on one event
    loop."""

    def __init__(self, pools: Pools, config: RelayConfig | None = None) -> None:
        self.pools = pools
        self.router = pools.router
        self.config = config or RelayConfig()
        self._streams: dict[str, RelayStream] = {}
        self._tick: asyncio.TimerHandle | None = None
        self._is_due = False  # a look at those that wait, in this turn of the loop
        self._checked_at = self._workers_looked_at = float("-inf")
        self.answer_tokens = float(_FIRST_GUESS)  # of a choice, lately
        self.reroutes: Counter[str] = Counter()  # by what became of the worker
        pools.on_change = self.dispatch_soon

    def submit(self, request: GenerationRequest) -> RelayStream:
        return self._submit(request, self.config.local_prefill)

    @property
    def hands_over(self) -> bool:
        is_allowed = self.config.local_prefill is not LocalPrefill.ALWAYS
        return is_allowed and bool(self.pools.usable(Leg.PREFILL))

    def submit_through(self, request: GenerationRequest) -> RelayStream:
        local = LocalPrefill.NEVER if self.hands_over else self.config.local_prefill
        return self._submit(request, local)

    def _submit(self, request: GenerationRequest, local_prefill: LocalPrefill) -> RelayStream:
        stream = RelayStream(self, request, local_prefill)
        self._streams[request.request_id] = stream
        stream.enter()
        return stream

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return len(self._streams)

    def check_health(self) -> None:
        missing = self.pools.missing()
        if missing is not None:
            raise nobody(missing)

    def check_open(self, caller: str) -> None:
        try:
            self.router.check_open(caller, self.config.soonest_priority, time.monotonic())
        except Refused as refused:
            raise full(refused) from None

    def dispatch_soon(self) -> None:
        """To be called when something has changed for those that wait: one look serves all that
        ends in a turn of the loop."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._dispatch_due)

    def _dispatch_due(self) -> None:
        if self._is_due:
            self.dispatch()

    def dispatch(self) -> None:
        """At once, for one that comes where nobody waits: whoever need not wait is not to fill the
        room of those who do."""
        self._is_due = False
        now = time.monotonic()
        for ask, placement in self.router.dispatch(now):
            self._streams[ask.request_id].place(placement)
        for ask in self.router.take_expired():
            self._streams[ask.request_id].expire()
        if not 0 <= now - self._workers_looked_at < _TICK_S:
            self._workers_looked_at = now
            self._take_from_workers()
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        self._check_somebody_is_there(now)
        if self.router.num_waiting:
            self._tick = asyncio.get_running_loop().call_later(_TICK_S, self.dispatch)

    def _check_somebody_is_there(self, now: float) -> None:
        """For all that wait: thousands with a timer each would take what the others need."""
        if self.router.num_waiting and not 0 <= now - self._checked_at < CHECK_S:
            self._checked_at = now
            if self.pools.missing() is not None:
                for stream in self._streams.values():
                    stream.look_around()

    def forget(self, stream: RelayStream) -> None:
        self._streams.pop(stream.request_id, None)
        self.pools.check_gone()
        self.dispatch_soon()

    def note_length(self, num_tokens: int) -> None:
        """Of a choice that was answered to its end."""
        self.answer_tokens += (1 - _FORGETTING) * (num_tokens - self.answer_tokens)

    def _take_from_workers(self) -> None:
        """Again and again: who could go on with it may come later."""
        for worker in self.router.stuck(Leg.DECODE, self.config.stall_s):
            session = self.pools.session_of(worker)
            if session is not None and session.num_open:
                self._take_from(session, WorkerStuck("the worker makes no steps"))
        for session in self.pools.to_be_moved():
            self._take_from(session, UnavailableError("the worker is leaving"))

    def _take_from(self, session: SessionBackend, why: UnavailableError) -> None:
        """As many as another worker may take, which is not about to leave itself; the rest ends
        where it is."""
        heirs, num_open = self.pools.staying() - {session}, session.num_open
        if not heirs:
            return
        for stream in list(self._streams.values()):
            stream.leave(session, heirs, why)
        num_moved = num_open - session.num_open
        if num_moved:
            logger.warning("%d requests of %s go on elsewhere: %s", num_moved, session.address, why)
