"""One answer, whoever gives it: a request's way through the router to a worker, and to another one
when that dies, leaves or refuses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from cluster.backend import RefusedError, Routed, nobody
from cluster.sent import Sent
from cluster.session import MAX_SUBMIT_BYTES, SessionBackend, SessionBroken
from cluster.session_stream import SessionStream
from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route
from engine.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    StepError,
    UnavailableError,
    in_full,
    throw,
)
from engine.request import GenerationRequest, GenerationUpdate
from kv_cache.names import cache_identity, name_blocks, root_name
from prefill_worker.named_workers import PrefixSource
from router.admission import Refused
from router.ask import Ask, Placement, keys_of
from router.workers import Worker

if TYPE_CHECKING:
    from cluster.relay import Relay

logger = logging.getLogger("kvrelay.relay")

CHECK_S = 0.5  # whether anybody is there at all
# Naming the blocks of so many tokens takes a quarter of a millisecond of the event loop.
_SHORT_PROMPT = 2048
_TOKEN_BYTES = 5  # at most


class WorkerStuck(UnavailableError):
    """The worker answers, and gets nowhere."""


class RelayStream(Routed):
    """One answer, whoever gives it.

    ```
    enter ──> (naming) ──> at the router ──place──> at a worker ──> whole
                ^            │ expire, refused         │ died, left, refused
                └────────────┴── error                 └──> enter
    ```
    """

    def __init__(
        self, relay: Relay, request: GenerationRequest, local_prefill: LocalPrefill
    ) -> None:
        self._relay = relay
        self._request = request
        self._local_prefill = local_prefill
        self._deadline = _deadline(request)
        self._sent = Sent.of(request)
        self._keys: Sequence[int] | None = None
        self._naming: asyncio.Task[None] | None = None
        self._prompt_reported = False
        self._lost: dict[Worker, str] = {}  # that died or got stuck under it, and how
        self._lost_alive: set[Worker] = set()  # of them, those that died and that it had come to
        self._without: frozenset[Worker] = frozenset()
        self._placed: _Placed | None = None
        self._problem: EngineError | None = None  # why it has no worker
        self._news = asyncio.Event()  # a worker, a problem, or that nobody is there
        self._closed = False
        self._hopes = False  # somebody was there since it came
        self._began = time.monotonic()
        self.routed_s = 0.0  # until a worker had it; where it was moved, until the last one had
        self.num_moves = 0
        self.placement: Placement | None = None  # the last one

    @property
    def request_id(self) -> str:
        return self._request.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationUpdate:
        while not self._sent.is_whole:
            placed = self._placed or await self._wait_for_place()
            try:
                return self._note(await anext(placed.stream))
            except (UnavailableError, QueueFullError) as error:
                self._unplace()
                if not self._goes_on(error, placed):
                    raise
                self.enter()
        raise StopAsyncIteration

    def stop_choice(self, choice: int) -> None:
        self._sent.finished[choice] = True
        if self._placed is not None:
            self._placed.stream.stop_choice(choice)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._naming is not None:
                self._naming.cancel()
            self._relay.router.withdraw(self.request_id, time.monotonic())
            self._unplace()
            self._relay.forget(self)

    def enter(self) -> None:
        """Asks the router for workers. The blocks of a long prompt are named off the loop."""
        self._problem = None
        self._hopes = self._hopes or self._relay.pools.has_decode(self._without)
        if self._keys is None and len(self._request.prompt_token_ids) > _SHORT_PROMPT:
            self._naming = asyncio.create_task(self._enter_later())
            return
        if self._keys is None:
            self._keys = self._named()
        self._ask(self._keys)

    def place(self, placement: Placement) -> None:
        """The router's answer."""
        self._hopes = True
        self.placement = placement
        session = self._relay.pools.session_of(placement.decode)
        if session is None:  # it went this very moment
            self._relay.router.ended(self.request_id, time.monotonic())
            self._ask(self._keys or [])
            return
        route = _route(placement, self._relay.config.max_candidates, self._local_prefill)
        stream = session.submit(self._rest(), route)
        stream.on_whole = self._give_up_place
        stream.on_failed = self._leave_place
        self._placed = _Placed(stream, session, placement.decode)
        self.routed_s = time.monotonic() - self._began
        self._news.set()

    def look_around(self) -> None:
        """Whether somebody is there whom it could go to."""
        if self._placed is None:
            self._news.set()

    def expire(self) -> None:
        """It waited for as long as it may, or as anybody may."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._fail(DeadlineError("no worker had time for it in the request's time"))
        else:
            most_s = self._relay.router.config.max_wait_s
            self._fail(RefusedError(f"no worker had time for it in {most_s:g} s"))

    def leave(
        self, session: SessionBackend, heirs: Set[SessionBackend], why: UnavailableError
    ) -> None:
        """To one of the heirs; what has come is read before."""
        if self._placed is None or self._placed.session is not session:
            return
        refused = {self._relay.pools.session_of(worker) for worker in self._without}
        if heirs - refused and self._may_be_sent:
            self._placed.stream.give_up(why)

    @property
    def _may_be_sent(self) -> bool:
        """To another worker, with what its client has, in one message."""
        num_tokens = len(self._request.prompt_token_ids) + self._sent.num_tokens
        return _TOKEN_BYTES * num_tokens < MAX_SUBMIT_BYTES

    async def _enter_later(self) -> None:
        try:
            self._keys = await asyncio.to_thread(self._named)
            self._ask(self._keys)
        except Exception:  # nobody awaits this, and its reader would wait until its deadline
            logger.exception("%s is not routed", self.request_id)
            self._fail(EngineError("the request could not be routed"))

    def _named(self) -> Sequence[int]:
        """What the index knows the prompt's blocks by; none before the model is known."""
        cache = self._relay.pools.cache
        if cache is None:
            return []
        identity = cache_identity(cache.fingerprint, cache.kv_format, cache.block_size)
        root = root_name(identity, self._request.cache_salt)
        names = name_blocks(root, self._request.prompt_token_ids, cache.block_size)
        return keys_of(names)

    def _ask(self, keys: Sequence[int]) -> None:
        request, sent = self._request, self._sent
        expected = self._relay.answer_tokens
        if request.params.max_tokens is not None:
            expected = min(expected, request.params.max_tokens)
        now = time.monotonic()
        ask = Ask(
            request_id=request.request_id,
            num_tokens=len(request.prompt_token_ids) + sent.most_tokens,
            keys=keys,
            num_new=max(1, round(expected)),
            num_choices=sent.num_left,
            priority=request.priority,
            tenant=request.tenant,
            arrived=self._began,
            deadline=self._deadline,
            without=self._without,
            moved=self.num_moves > 0,
            may_stay=self._may_stay,
        )
        try:
            self._relay.router.submit(ask, now)
        except Refused as refused:
            self._fail(full(refused))
            return
        if self._relay.router.num_waiting > 1:
            self._relay.dispatch_soon()  # with all that come in this turn of the loop
        else:
            self._relay.dispatch()

    def _fail(self, problem: EngineError) -> None:
        self._problem = problem
        self._news.set()

    def _take_problem(self) -> EngineError:
        problem, self._problem = self._problem, None
        assert problem is not None
        return problem

    async def _wait_for_place(self) -> _Placed:
        """As long as its deadline allows; but not for somebody to come where nobody is. Who refused
        it is asked again when the others, for which it waited, are gone."""
        alone_since: float | None = None
        had_others = False
        config, pools = self._relay.config, self._relay.pools
        while self._placed is None:
            if self._problem is not None:
                throw(self._take_problem())
            now = time.monotonic()
            self._hopes = self._hopes or pools.has_decode(self._without)
            most_s = config.max_alone_s if self._hopes else config.max_new_alone_s
            missing = pools.missing(self._without, self._may_stay)
            if missing is None:
                alone_since, had_others = None, bool(self._without)
            elif had_others:
                had_others = False
                self._relay.router.withdraw(self.request_id, now)
                self._without = frozenset()
                self.enter()
                continue
            elif alone_since is None:
                alone_since = now
            elif now - alone_since >= most_s:
                self._relay.router.withdraw(self.request_id, now)
                raise nobody(missing)
            left_s = most_s if alone_since is None else alone_since + most_s - now
            is_told = missing is None and self._may_stay and not self._without
            self._news.clear()
            if is_told:
                await self._news.wait()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(min(CHECK_S, left_s)):
                    await self._news.wait()
        return self._placed

    @property
    def _may_stay(self) -> bool:
        return self._local_prefill is not LocalPrefill.NEVER

    def _rest(self) -> GenerationRequest:
        left_s = None if self._deadline is None else max(0.001, self._deadline - time.monotonic())
        return replace(self._request, sent=self._sent.so_far(), timeout_s=left_s)

    def _note(self, update: GenerationUpdate) -> GenerationUpdate:
        for length in self._sent.add(update):
            self._relay.note_length(length)
        if self._note_begin():
            self._relay.dispatch_soon()
        if self._prompt_reported:
            return update._replace(prompt=None)
        self._prompt_reported = update.prompt is not None
        return update

    def _note_begin(self) -> bool:
        """Whether this is the first that came."""
        if self._placed is None or self._placed.began:
            return False
        self._placed.began = True
        self._relay.router.began(self.request_id, time.monotonic())
        return True

    def _give_up_place(self) -> None:
        """There is room for another, whoever has not read this answer yet: it may be one of many
        that a single client waits for."""
        self._note_begin()
        self._leave_place()

    def _leave_place(self) -> None:
        """Of a worker that has the request no more, however long the client takes to read why."""
        self._relay.router.ended(self.request_id, time.monotonic())
        self._relay.dispatch_soon()

    def _goes_on(self, error: EngineError, placed: _Placed) -> bool:
        """Elsewhere, or else the error is its reader's."""
        session = placed.session
        if isinstance(error, (SessionBroken, WorkerStuck)):
            self._note_lost(error, placed.worker)
        if isinstance(error, SessionBroken):
            self._without = frozenset()  # who refused it may have time for it by now
        elif not isinstance(error, WorkerStuck):  # that one gets nothing until it makes steps again
            self._without |= {placed.worker}
            if not session.is_left and not self._has_another:
                return False
        self.num_moves += 1
        self._relay.reroutes[_what_became(error, session)] += 1
        # of a worker that has thousands, one line says how many
        logger.debug("%s goes on elsewhere: %s", self.request_id, in_full(error))
        return True

    @property
    def _has_another(self) -> bool:
        """Who has not refused it; where its client has a part of the answer, also one that does not
        answer now, which may be back in a moment."""
        pools, without = self._relay.pools, self._without
        begun = self._sent.num_tokens > 0
        return pools.has_decode(without) or (begun and pools.names_decode(without))

    def _note_lost(self, error: SessionBroken | WorkerStuck, worker: Worker) -> None:
        """StepError once it is the likely cause. Of one that is stuck that is less likely."""
        self._lost[worker] = error.detail or f"{worker.address}: {error}"
        if isinstance(error, SessionBroken) and error.had_come:
            self._lost_alive.add(worker)
        most = self._relay.config.max_lost_workers
        if len(self._lost_alive) >= most or len(self._lost) > most:
            message = f"{len(self._lost)} workers died or got stuck under request {self.request_id}"
            logger.warning("%s: %s", message, "; ".join(self._lost.values()))
            raise StepError(message) from error

    def _unplace(self) -> None:
        if self._placed is not None:
            self._placed.stream.close()
            self._placed = None
            self._relay.router.ended(self.request_id, time.monotonic())


class _Placed:
    """A request at a decode worker."""

    def __init__(self, stream: SessionStream, session: SessionBackend, worker: Worker) -> None:
        self.stream = stream
        self.session = session
        self.worker = worker
        self.began = False  # its first token came


def _what_became(error: EngineError, session: SessionBackend) -> str:
    if isinstance(error, SessionBroken):
        return "died"
    if isinstance(error, WorkerStuck):
        return "stuck"
    return "left" if session.is_left else "refused"


def full(refused: Refused) -> RefusedError:
    return RefusedError(str(refused), refused.retry_after_s)


def _deadline(request: GenerationRequest) -> float | None:
    return None if request.timeout_s is None else time.monotonic() + request.timeout_s


def _route(placement: Placement, max_candidates: int, local_prefill: LocalPrefill) -> Route:
    """The decode worker decides once more, by what it knows better: its own queue."""
    candidates = placement.prefill[:max_candidates]
    return Route(
        tuple(PrefillCandidate(worker.address, worker.incarnation) for worker in candidates),
        tuple(
            PrefixSource(source.worker.address, source.worker.incarnation, source.num_tokens)
            for source in placement.sources
        ),
        local_prefill,
    )
