"""Prompts whose cache comes from another worker: who is asked, in which order, and what then."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.async_engine import AsyncEngine
from engine.errors import EngineError, RequestError, UnavailableError
from engine.handoff import (
    ComputeHere,
    Delivered,
    FetchFailed,
    FetchOutcome,
    FirstToken,
    Refetch,
    Reservation,
    UnfinishedReads,
)
from engine.request import GenerationRequest, RequestId
from engine.wire.logprobs import decode_logprobs
from engine.wire.params import encode_params
from kv_transfer.errors import TransferError
from kv_transfer.exchange import Exchange
from kv_transfer.link import Link
from kv_transfer.puller import HandOff, Pulled
from protos import handoff_pb2 as wire
from protos.handoff_pb2 import Ask, Compute, PrefixSource
from protos.rpc import PROTOCOL

logger = logging.getLogger(__name__)


Candidate = tuple[str, int]  # address and incarnation; 0 is whichever is there


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Who may be asked for a request's prompt, in order; `local` is the last resort."""

    candidates: Sequence[Candidate]
    sources: Sequence[PrefixSource] = ()
    local: bool = True


@dataclass(slots=True, eq=False)
class _Wanted:
    request: GenerationRequest
    plan: FetchPlan
    deadline: float | None
    num_failed: int = 0  # candidates, from the first on, that are not asked again
    problems: list[str] = field(default_factory=list)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)


class Fetcher:
    """Answers every reservation of its engine with exactly one end, whatever happens.

    Used on the event loop's thread. A candidate that fails is not asked again for the same
    request. The next one gets the same blocks where every read has ended, fresh ones where not.
    """

    def __init__(self, engine: AsyncEngine, exchange: Exchange, incarnation: int) -> None:
        self._engine = engine
        self._exchange = exchange
        self._incarnation = incarnation
        self._wanted: dict[RequestId, _Wanted] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def expect(self, request: GenerationRequest, plan: FetchPlan) -> None:
        """Before the request is submitted; `forget` when its stream is closed."""
        timeout_s = request.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._wanted[request.request_id] = _Wanted(request, plan, deadline)

    def forget(self, request_id: RequestId) -> None:
        wanted = self._wanted.pop(request_id, None)
        for task in wanted.tasks if wanted else ():
            task.cancel()

    def on_reserved(self, reservation: Reservation) -> None:
        wanted = self._wanted.get(reservation.request_id)
        task = asyncio.ensure_future(self._fetch(reservation, wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if wanted is not None:
            wanted.tasks.add(task)
            task.add_done_callback(wanted.tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fetch(self, reservation: Reservation, wanted: _Wanted | None) -> None:
        """One reservation, from the first candidate to its end."""
        attempt = _Attempt()
        outcome: FetchOutcome = ComputeHere()
        try:
            if wanted is not None:
                outcome = await self._ask_in_turn(reservation, wanted, attempt)
        finally:
            # Also when cancelled: what was reserved is given back in any case.
            await asyncio.shield(self._end(reservation, outcome, attempt))

    async def _end(
        self, reservation: Reservation, outcome: FetchOutcome, attempt: "_Attempt"
    ) -> None:
        self.outcomes[type(outcome).__name__] += 1
        left = [] if attempt.hand_off is None else await attempt.hand_off.unfinished()
        reads = [UnfinishedReads(one.group, one.blocks) for one in left]
        try:
            holds = await self._engine.end_fetch(reservation, outcome, reads)
        except EngineError as error:
            logger.info("a fetch ended after its engine: %s", error)
        else:
            self._exchange.quarantine.keep(left, holds)

    async def _ask_in_turn(
        self, reservation: Reservation, wanted: _Wanted, attempt: "_Attempt"
    ) -> FetchOutcome:
        while wanted.num_failed < len(wanted.plan.candidates):
            address, incarnation = wanted.plan.candidates[wanted.num_failed]
            try:
                link = await self._exchange.links.get(address, incarnation)
                return await self._pull(link, reservation, wanted, attempt)
            except TransferError as error:
                wanted.num_failed += 1
                wanted.problems.append(f"{address}: {error}")
                logger.warning("prefill at %s failed: %s", address, error)
            if attempt.hand_off is not None and await attempt.hand_off.unfinished():
                return Refetch()
        if wanted.plan.local:
            return ComputeHere()
        reasons = "; ".join(wanted.problems) or "none was named"
        return FetchFailed(UnavailableError(f"no prefill worker could serve: {reasons}"))

    async def _pull(
        self,
        link: Link,
        reservation: Reservation,
        wanted: _Wanted,
        attempt: "_Attempt",
    ) -> Delivered:
        left_s = None
        if wanted.deadline is not None:
            left_s = max(0.0, wanted.deadline - time.monotonic())
        ask = self._make_ask(reservation, wanted, link.incarnation, left_s)
        hand_off = self._exchange.hand_off(link, ask, reservation.held, left_s)
        attempt.hand_off = hand_off
        return _delivered(await hand_off.run(), reservation)

    def _make_ask(
        self, reservation: Reservation, wanted: _Wanted, incarnation: int, left_s: float | None
    ) -> Ask:
        request = wanted.request
        compute = Compute(
            params=encode_params(reservation.params),
            priority=request.priority,
            deadline_ms=0 if left_s is None else max(1, int(left_s * 1e3)),
            draw=reservation.draw,
            sources=wanted.plan.sources,
        )
        return Ask(
            protocol=PROTOCOL,
            handoff_id=f"{request.request_id}/{reservation.attempt}",
            holder_incarnation=incarnation,
            puller_incarnation=self._incarnation,
            token_ids=reservation.token_ids,
            cache_salt=request.cache_salt,
            first_token=reservation.held.start,
            compute=compute,
        )


@dataclass(slots=True)
class _Attempt:
    """The hand-off that last wrote into a reservation's blocks."""

    hand_off: HandOff | None = None


def _delivered(pulled: Pulled, reservation: Reservation) -> Delivered:
    """What came beside the blocks, checked: it comes from a peer."""
    tokens, prompt_logprobs = pulled.tokens, pulled.prompt_logprobs
    params = reservation.params
    wanted = params.n if reservation.draw else 0
    if len(tokens) not in (0, wanted):
        raise TransferError(f"the holder drew {len(tokens)} first tokens, {wanted} were wanted")
    wanted = 0 if params.prompt_logprobs is None else len(reservation.token_ids) - 1
    if len(prompt_logprobs) != wanted:
        raise TransferError(f"{len(prompt_logprobs)} prompt logprobs came, {wanted} were wanted")
    try:
        return Delivered(
            tuple(_first_token(token) for token in tokens),
            decode_logprobs(prompt_logprobs, "prompt_logprobs"),
        )
    except RequestError as error:
        raise TransferError(f"the holder's answer makes no sense: {error}") from None


def _first_token(token: wire.FirstToken) -> FirstToken:
    has_logprobs = token.HasField("logprobs")
    logprobs = decode_logprobs([token.logprobs], "logprobs")[0] if has_logprobs else None
    return FirstToken(token.token_id, logprobs)
