"""Prompts whose cache comes from another worker: who is asked, in which order, and what then."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from engine.async_engine import AsyncEngine
from engine.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    StepError,
    UnavailableError,
)
from engine.handoff import (
    ComputeHere,
    Delivered,
    FetchFailed,
    FetchOutcome,
    Refetch,
    Reservation,
    UnfinishedReads,
)
from engine.request import GenerationRequest, RequestId
from engine.wire.failures import decode_failure
from kv_transfer.errors import LinkLost, Refused, TransferError, Unreachable
from kv_transfer.exchange import Exchange
from kv_transfer.link import Link
from kv_transfer.puller import HandOff, Pulled
from prefill_worker.asks import (
    Parties,
    ask_for_prefix,
    ask_for_prompt,
    read_prefix,
    read_prompt,
)
from prefill_worker.candidates import Candidate, Candidates
from prefill_worker.named_workers import PrefixSource
from prefill_worker.prefixes import GRACE_S, PrefixPlan, PrefixPlanner
from protos.generation_pb2 import Failure, SamplingParams
from protos.handoff_pb2 import Ask

logger = logging.getLogger(__name__)

LAST_WORDS_S = 0.2  # before a request's deadline, to say why there is no answer
_MANY_LOGPROBS = 1000  # of a prompt: as many take 10 ms to read


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Who may be asked for a request's prompt, in order; `local` is the last resort.

    `sources` are for whoever computes the prompt, `prefix` is what is pulled from them here.
    """

    candidates: Sequence[Candidate] = ()
    sources: Sequence[PrefixSource] = ()
    local: bool = True
    prefix: PrefixPlan | None = None


class FetchEnd(StrEnum):
    """What became of a fetch, by the names of its metric."""

    DELIVERED = "delivered"
    FETCHED_AGAIN = "fetched_again"
    COMPUTED_HERE = "computed_here"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class _Wanted:
    request: GenerationRequest
    plan: FetchPlan
    deadline: float | None
    candidates: Candidates
    refusal: EngineError | None = None  # of its parameters, which are the same to every worker
    tasks: set["asyncio.Task[FetchOutcome]"] = field(default_factory=set)

    def left_s(self, at_most: float | None = None) -> float | None:
        """Of the request's time, None without an end."""
        if self.deadline is None:
            return at_most
        left_s = max(0.0, self.deadline - time.monotonic())
        return left_s if at_most is None else min(left_s, at_most)


class Fetcher:
    """Answers every reservation of its engine with exactly one end, whatever happens.

    Used on the event loop's thread. A candidate that fails is not asked again for the same
    request, unless it was the link that failed. The next one gets the same blocks where every
    read has ended; where not, a prompt gets fresh ones and a prefix is given up. `patience_s`:
    how long candidates that cannot be reached are tried for a prompt that nobody else may
    compute. If all are busy it is refused, but where its client has a part of the answer already:
    then they are asked until one has room.
    """

    def __init__(
        self, engine: AsyncEngine, exchange: Exchange, incarnation: int, patience_s: float = 0.0
    ) -> None:
        self._engine = engine
        self._exchange = exchange
        self._incarnation = incarnation
        self._patience_s = patience_s
        self._wanted: dict[RequestId, _Wanted] = {}
        self._tasks: dict[asyncio.Task[None], asyncio.Task[FetchOutcome]] = {}
        self.address: str | None = None  # where others may ask for what is cached here
        self.prefixes = PrefixPlanner(engine, exchange.links, incarnation)
        self.num_prefix_tokens = 0  # pulled from those who had them
        self.ends = Counter(dict.fromkeys(FetchEnd, 0))

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def expect(self, request: GenerationRequest, plan: FetchPlan) -> None:
        """Before the request is submitted; `forget` when its stream is closed."""
        timeout_s = request.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        latest = math.inf if deadline is None else deadline - LAST_WORDS_S
        patience_s = 0.0 if plan.local else self._patience_s
        until_free = bool(request.sent) and not plan.local
        candidates = Candidates(plan.candidates, patience_s, latest, until_free)
        self._wanted[request.request_id] = _Wanted(request, plan, deadline, candidates)

    def forget(self, request_id: RequestId) -> None:
        wanted = self._wanted.pop(request_id, None)
        for asking in wanted.tasks if wanted else ():
            asking.cancel()

    def on_reserved(self, reservation: Reservation) -> None:
        """Asking may be cancelled, at any time; ending what was reserved is a task of its own,
        which never is."""
        wanted, attempt = self._wanted.get(reservation.request_id), _Attempt()
        asking = asyncio.ensure_future(self._ask(reservation, wanted, attempt))
        task = asyncio.ensure_future(self._see_through(reservation, wanted, asking, attempt))
        self._tasks[task] = asking
        task.add_done_callback(lambda done: self._tasks.pop(done))
        if wanted is not None:
            wanted.tasks.add(asking)
            asking.add_done_callback(wanted.tasks.discard)

    async def close(self) -> None:
        for asking in self._tasks.values():
            asking.cancel()
        await asyncio.gather(*self._tasks)

    async def _see_through(
        self,
        reservation: Reservation,
        wanted: _Wanted | None,
        asking: "asyncio.Task[FetchOutcome]",
        attempt: "_Attempt",
    ) -> None:
        await asyncio.wait({asking})
        outcome: FetchOutcome = ComputeHere()
        if asking.cancelled() or wanted is None:  # who asked for it has left
            self.ends[FetchEnd.CANCELLED] += 1
        else:
            bug = asking.exception()
            if bug is None:
                outcome = asking.result()
            else:
                logger.error("fetching for %s failed", reservation.request_id, exc_info=bug)
                if wanted is not None and not wanted.plan.local:
                    outcome = FetchFailed(StepError(f"fetching failed: {bug!r}"))
            self.ends[_end_of(outcome, reservation)] += 1
        await self._end(reservation, outcome, attempt)

    async def _ask(
        self, reservation: Reservation, wanted: _Wanted | None, attempt: "_Attempt"
    ) -> FetchOutcome:
        if wanted is None:
            return ComputeHere()
        ask = self._ask_sources if reservation.of_prefix else self._ask_in_turn
        return await ask(reservation, wanted, attempt)

    async def _end(
        self, reservation: Reservation, outcome: FetchOutcome, attempt: "_Attempt"
    ) -> None:
        if isinstance(outcome, Delivered):
            outcome = attempt.timed(outcome, time.monotonic())
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
        candidates = wanted.candidates
        while wanted.left_s() != 0.0:
            number = candidates.next()
            if number is not None:
                delivered = await self._ask_one(number, reservation, wanted, attempt)
                if delivered is not None:
                    return delivered
                if wanted.refusal is not None and not wanted.plan.local:
                    return FetchFailed(wanted.refusal)
                if attempt.hand_off is not None and await attempt.hand_off.unfinished():
                    return Refetch()
            elif (pause_s := candidates.begin_round(time.monotonic())) is not None:
                await asyncio.sleep(pause_s)
            elif wanted.plan.local:
                return ComputeHere()
            else:
                return FetchFailed(_given_up(reservation, candidates))
        return FetchFailed(DeadlineError("the prompt was not fetched in time"))

    async def _ask_one(
        self, number: int, reservation: Reservation, wanted: _Wanted, attempt: "_Attempt"
    ) -> Delivered | None:
        """None where it could not serve, or not be reached."""
        candidates, sources = wanted.candidates, wanted.plan.sources
        address, incarnation = candidates[number]
        link: Link | None = None
        try:
            link = await self._link(
                address, incarnation, self._link_patience_s(reservation, wanted)
            )
            left_s, parties = wanted.left_s(), self._parties(link)
            ask = ask_for_prompt(reservation, wanted.request, parties, left_s, sources)
            pulled = await self._pull(link, ask, reservation, left_s, attempt)
            vocab_size = self._engine.engine.limits.vocab_size
            if len(pulled.prompt_logprobs) < _MANY_LOGPROBS:
                return read_prompt(pulled, reservation, vocab_size)
            return await asyncio.to_thread(read_prompt, pulled, reservation, vocab_size)
        except Unreachable as error:
            if candidates.note_unreached(number, str(error)):
                logger.warning("%s: prefill at %s: %s", reservation.request_id, address, error)
        except TransferError as error:
            is_news = True
            if isinstance(error, Refused) and _is_of_parameters(error.failure):
                wanted.refusal = decode_failure(error.failure)
            if isinstance(error, Refused) and error.failure.kind == Failure.KIND_BUSY:
                is_news = candidates.note_busy(number, str(error))
            elif isinstance(error, LinkLost):
                candidates.note_broke_off(number, str(error), link)
            else:
                candidates.note_failed(number, str(error))
            if is_news:
                name = reservation.request_id
                logger.warning("%s: prefill at %s failed: %s", name, address, error)
        return None

    async def _ask_sources(
        self, reservation: Reservation, wanted: _Wanted, attempt: "_Attempt"
    ) -> FetchOutcome:
        """Without a source that has it the prompt is gone on with from where it is cached."""
        plan = wanted.plan.prefix
        assert plan is not None, "a prefix that nobody planned was reserved"
        deadline = time.monotonic() + plan.timeout_s
        for address, incarnation in plan.sources:
            left_s = wanted.left_s(max(0.0, deadline - time.monotonic()))
            if left_s == 0.0:
                break  # nobody was asked, so nobody was not reached
            try:
                link = await self._link(address, incarnation, left_s)
                ask = ask_for_prefix(reservation, wanted.request, self._parties(link))
                left_s = wanted.left_s(max(0.0, deadline - time.monotonic()))
                pulled = await self._pull(link, ask, reservation, left_s, attempt)
                delivered = read_prefix(pulled, reservation)
                self.num_prefix_tokens += pulled.end - reservation.held.start
                return delivered
            except TransferError as error:
                logger.info("no prefix from %s: %s", address, error)
                if isinstance(error, Unreachable) and wanted.left_s() != 0.0:
                    self.prefixes.note_unreached(incarnation)
            if attempt.hand_off is not None and await attempt.hand_off.unfinished():
                return ComputeHere()
        return Delivered(end=reservation.held.start)

    def _link_patience_s(self, reservation: Reservation, wanted: _Wanted) -> float | None:
        """No longer than the prompt would take here, where it may be computed here: a connector
        that cannot reach a peer takes seconds to be given up."""
        if not wanted.plan.local:
            return wanted.left_s()
        num_tokens = reservation.held.end - reservation.held.start
        token_s = self._engine.engine.step_times.whole_prompt_token_s
        return wanted.left_s(GRACE_S + num_tokens * token_s)

    async def _link(self, address: str, incarnation: int, left_s: float | None) -> Link:
        try:
            async with asyncio.timeout(left_s):
                return await self._exchange.links.get(address, incarnation)
        except TimeoutError:
            raise Unreachable(f"{address} was not reached in time") from None

    async def _pull(
        self,
        link: Link,
        ask: Ask,
        reservation: Reservation,
        left_s: float | None,
        attempt: "_Attempt",
    ) -> Pulled:
        hand_off = self._exchange.hand_off(link, ask, reservation.held, left_s)
        attempt.hand_off = hand_off
        return await hand_off.run()

    def _parties(self, link: Link) -> Parties:
        return Parties(link.incarnation, self._incarnation, self.address)


def _given_up(reservation: Reservation, candidates: Candidates) -> EngineError:
    problems = candidates.problems
    if candidates.some_are_busy:
        error: EngineError = QueueFullError("every prefill worker is busy")
    else:
        error = UnavailableError("no prefill worker could serve", problems)
    logger.warning("%s: %s: %s", reservation.request_id, error, problems)
    return error


def _is_of_parameters(failure: Failure) -> bool:
    """What is wrong with a prompt, as its length, may be so there alone."""
    is_invalid = failure.kind == Failure.KIND_INVALID
    return is_invalid and failure.field in SamplingParams.DESCRIPTOR.fields_by_name


def _end_of(outcome: FetchOutcome, reservation: Reservation) -> FetchEnd:
    """Of a prefix of which nothing came all is computed here."""
    match outcome:
        case Delivered():
            came = outcome.end_of(reservation) > reservation.held.start
            is_there = came or not reservation.of_prefix
            return FetchEnd.DELIVERED if is_there else FetchEnd.COMPUTED_HERE
        case Refetch():
            return FetchEnd.FETCHED_AGAIN
        case ComputeHere():
            return FetchEnd.COMPUTED_HERE
        case FetchFailed():
            return FetchEnd.FAILED


@dataclass(slots=True)
class _Attempt:
    """The hand-off that last wrote into a reservation's blocks."""

    hand_off: HandOff | None = None
    began: float = field(default_factory=time.monotonic)

    def timed(self, delivered: Delivered, now: float) -> Delivered:
        """What the holder did not wait for or compute was spent on reaching it and on bytes."""
        queued_s, prefill_s, _ = delivered.times
        transfer_s = max(0.0, now - self.began - queued_s - prefill_s)
        return replace(delivered, times=delivered.times._replace(transfer_s=transfer_s))
