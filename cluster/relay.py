"""Both pools as a Backend: each request goes to a pair of workers, and to another one when its
worker dies or leaves, with what its client has already."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from cluster.pools import Pools
from cluster.session import SessionBackend, SessionBroken
from cluster.session_stream import SessionStream
from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route
from engine.errors import EngineError, QueueFullError, StepError, UnavailableError
from engine.request import ChoiceSoFar, GenerationRequest, GenerationUpdate
from router.workers import Standing

logger = logging.getLogger("kvrelay.relay")


@dataclass(frozen=True)
class RelayConfig:
    """`max_lost_workers`: a request that so many workers died under is the likely cause. A
    worker that was not heard of since the request came may have been dead before, as when a
    whole machine goes; one such more is forgiven. `max_wait_s`: for a worker to come, where
    there is none."""

    local_prefill: LocalPrefill = LocalPrefill.AUTO
    max_lost_workers: int = 2
    max_wait_s: float = 30.0
    max_candidates: int = 3


class Relay:
    """Used on one event loop."""

    def __init__(self, pools: Pools, config: RelayConfig | None = None) -> None:
        self.pools = pools
        self.config = config or RelayConfig()
        self._streams: set[RelayStream] = set()
        self.reroutes: Counter[str] = Counter()  # by what became of the worker
        pools.on_move = self._move

    def submit(self, request: GenerationRequest) -> RelayStream:
        stream = RelayStream(self, request)
        self._streams.add(stream)
        stream.place()
        return stream

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return len(self._streams)

    @property
    def num_rerouted(self) -> int:
        return self.reroutes.total()

    def check_health(self) -> None:
        if self.pools.best_decode() is None:
            raise UnavailableError("no decode worker answers")

    def forget(self, stream: RelayStream) -> None:
        self._streams.discard(stream)
        self.pools.check_gone()

    def _move(self, session: SessionBackend) -> None:
        """As many as another worker may take; the rest ends where it is."""
        if self.pools.best_decode({session}) is None:
            return
        for stream in list(self._streams):
            stream.leave(session)


class RelayStream:
    """One answer, whoever gives it."""

    def __init__(self, relay: Relay, request: GenerationRequest) -> None:
        self._relay = relay
        self._request = request
        self._deadline = _deadline(request)
        self._sent = _Sent.of(request)
        self._prompt_reported = False
        self._lost: list[str] = []  # workers that died under it
        self._num_lost_alive = 0  # of them, heard of since it came
        self._refused: set[SessionBackend] = set()
        self._placed: _Placed | None = None
        self._closed = False
        self._began = time.monotonic()
        self.routed_s = 0.0  # until a worker had it; where it was moved, until the last one had
        self.num_moves = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationUpdate:
        while not self._sent.is_whole:
            placed = self._placed or await self._wait_for_place()
            try:
                return self._note(await anext(placed.stream))
            except (UnavailableError, QueueFullError) as error:
                self._unplace()
                self._go_on_or_raise(error, placed)
        raise StopAsyncIteration

    def stop_choice(self, choice: int) -> None:
        self._sent.finished[choice] = True
        if self._placed is not None:
            self._placed.stream.stop_choice(choice)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._unplace()
            self._relay.forget(self)

    def place(self) -> _Placed | None:
        """Submits what is left to the best worker there is now; None where there is none."""
        member = self._relay.pools.best_decode(self._refused)
        if member is None or member.session is None:
            return None
        config = self._relay.config
        candidates = self._relay.pools.prefill_candidates()[: config.max_candidates]
        stream = member.session.submit(self._rest(), _route(candidates, config.local_prefill))
        standings = [member.standing, *candidates[:1]]
        num_tokens = len(self._request.prompt_token_ids)
        self._placed = _Placed(stream, member.session, standings, num_tokens)
        self.routed_s = time.monotonic() - self._began
        return self._placed

    def leave(self, session: SessionBackend) -> None:
        """What has come is read before it goes on elsewhere."""
        if self._placed is not None and self._placed.session is session:
            self._placed.stream.give_up(UnavailableError("the worker is leaving"))

    async def _wait_for_place(self) -> _Placed:
        end = time.monotonic() + self._relay.config.max_wait_s
        if self._deadline is not None:
            end = min(end, self._deadline)
        while (placed := self.place()) is None:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise UnavailableError("no decode worker answers")
            await self._relay.pools.wait_for_change(left_s)
        return placed

    def _rest(self) -> GenerationRequest:
        left_s = None if self._deadline is None else max(0.001, self._deadline - time.monotonic())
        return replace(self._request, sent=self._sent.so_far(), timeout_s=left_s)

    def _note(self, update: GenerationUpdate) -> GenerationUpdate:
        self._sent.add(update)
        if self._placed is not None:
            self._placed.end_prompt()
        if self._prompt_reported:
            return update._replace(prompt=None)
        self._prompt_reported = update.prompt is not None
        return update

    def _go_on_or_raise(self, error: EngineError, placed: _Placed) -> None:
        request_id, session = self._request.request_id, placed.session
        if isinstance(error, SessionBroken):
            self._lost.append(str(error))
            self._num_lost_alive += placed.was_heard_of
            most = self._relay.config.max_lost_workers
            if self._num_lost_alive >= most or len(self._lost) > most:
                message = f"{len(self._lost)} workers died under request {request_id}"
                raise StepError(f"{message}: {'; '.join(self._lost)}") from error
        else:
            self._refused.add(session)
            if not session.leaving and self._relay.pools.best_decode(self._refused) is None:
                raise error
        self.num_moves += 1
        self._relay.reroutes[_what_became(error, session)] += 1
        logger.warning("%s goes on elsewhere: %s", request_id, error)

    def _unplace(self) -> None:
        if self._placed is not None:
            self._placed.close()
            self._placed = None


class _Placed:
    """A request at a decode worker; what it weighs there, and at the worker that may compute
    its prompt, is in their standings until it ends."""

    def __init__(
        self,
        stream: SessionStream,
        session: SessionBackend,
        standings: Sequence[Standing],
        num_tokens: int,
    ) -> None:
        self.stream = stream
        self.session = session
        self._num_messages = session.num_messages
        self._standings = standings
        self._num_tokens = num_tokens
        for standing in standings:
            standing.num_given += 1
            standing.num_given_tokens += num_tokens

    @property
    def was_heard_of(self) -> bool:
        """Whether the worker has said anything, of whichever request, since this one came."""
        return self.session.num_messages > self._num_messages

    def end_prompt(self) -> None:
        for standing in self._standings:
            standing.num_given_tokens -= self._num_tokens
        self._num_tokens = 0

    def close(self) -> None:
        self.end_prompt()
        self.stream.close()
        for standing in self._standings:
            standing.num_given -= 1


@dataclass(slots=True)
class _Sent:
    """What the client has of each choice."""

    token_ids: list[list[int]]
    finished: list[bool]

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        before = request.sent or [ChoiceSoFar([])] * request.params.n
        return cls([list(one.token_ids) for one in before], [one.finished for one in before])

    @property
    def is_whole(self) -> bool:
        return all(self.finished)

    def add(self, update: GenerationUpdate) -> None:
        for delta in update.deltas:
            self.token_ids[delta.choice] += delta.token_ids
            if delta.finish_reason is not None:
                self.finished[delta.choice] = True

    def so_far(self) -> tuple[ChoiceSoFar, ...]:
        """Nothing where nothing has begun: such a request is like a new one."""
        if not any(self.finished) and not any(self.token_ids):
            return ()
        pairs = zip(self.token_ids, self.finished, strict=True)
        return tuple(ChoiceSoFar(list(tokens), finished) for tokens, finished in pairs)


def _what_became(error: EngineError, session: SessionBackend) -> str:
    if isinstance(error, SessionBroken):
        return "died"
    return "left" if session.leaving else "refused"


def _deadline(request: GenerationRequest) -> float | None:
    return None if request.timeout_s is None else time.monotonic() + request.timeout_s


def _route(candidates: Sequence[Standing], local_prefill: LocalPrefill) -> Route:
    workers = (one.worker for one in candidates)
    return Route(
        tuple(PrefillCandidate(worker.address, worker.incarnation) for worker in workers),
        local_prefill=local_prefill,
    )
