"""Which tokens the next step computes, for whom, and in which blocks."""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

from engine.errors import EngineError, RequestError, StepError
from engine.grammar.interface import CompiledGrammar
from engine.handoff import (
    ComputeHere,
    Delivered,
    FetchFailed,
    FetchOutcome,
    Quarantined,
    Refetch,
    Reservation,
    UnfinishedReads,
)
from engine.request import GenerationRequest, RequestId
from engine.scheduler.admission import Admission
from engine.scheduler.ahead import Ahead
from engine.scheduler.course import Counts
from engine.scheduler.draft import Draft, Part, ScheduledStep
from engine.scheduler.fetches import Fetches, find_problem
from engine.scheduler.limits import (
    SchedulerLimits,
    check_first_token,
    check_prompt,
    check_request,
)
from engine.scheduler.order import due_s
from engine.scheduler.outbox import NOTHING, Outbox, StepOutput
from engine.scheduler.progress import Progress
from engine.scheduler.roster import Roster
from engine.scheduler.sequence import QUEUED, Sequence, SequenceState
from engine.scheduler.service import Service
from engine.scheduler.swap import SwapSpace
from engine.step import GRAMMAR_FAILED, NO_TOKEN_LEFT, NOT_FINITE, StepResult
from engine.step_times import StepCosts
from kv_cache.cache import KvCache
from kv_cache.handover import HeldRange, hold_cached
from kv_cache.names import SequenceNames, root_name


class SchedulerFigures(NamedTuple):
    """Of numbers that are kept anyway."""

    num_running: int
    num_waiting: int
    num_fetching: int
    num_preemptions: int
    num_swapped_blocks: int
    num_computed_tokens: int  # of prompts that were read to their end
    num_cached_tokens: int
    num_pulled_tokens: int
    num_drawn_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """Each is from one of three sources."""
        return self.num_computed_tokens + self.num_cached_tokens + self.num_pulled_tokens


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    num_running: int
    num_waiting: int
    num_fetching: int
    num_preemptions: int
    num_swapped_blocks: int
    num_queued_tokens: int  # of prompts, to be computed here: by who waits, or has begun
    num_context_tokens: int  # in the cache of sequences that run: what a decode step reads
    num_drawing: int  # that run and have been read to their last token,
    num_drawing_context: int  # and have so many in the cache


class Scheduler:
    """Continuous batching over a paged cache; plain data in, plain data out.

    A step goes `schedule` -> (the runner) -> `complete` or `fail`; what `schedule` itself has to
    say is in `take_news`. While the runner is at a step, `schedule_ahead` may give the next one,
    and then that is in flight when the first one has ended. All else is called while no step is
    in flight, or one that was planned ahead.

    Running sequences are served first, one token each before prompt chunks; waiting ones are
    admitted, in order, when their whole prompt and one more block fit. When a running sequence
    finds no block, the one that would be served last gives up its own; the first in line never
    does, it waits for transfers to end. So what was admitted ends.
    """

    def __init__(self, limits: SchedulerLimits, cache: KvCache, swap: SwapSpace) -> None:
        self._limits = limits
        self._cache = cache
        self._swap = swap
        self._roster = Roster(limits, cache, swap)
        self._fetches = Fetches(cache.transfers)
        self._admission = Admission(limits, cache, swap, self._roster, self._fetches)
        self._progress = Progress(limits, cache, self._roster)
        self._steps = count(1)
        self._service = Service(limits, cache, swap, self._roster, self._admission)
        self._ahead = Ahead(limits, cache, self._roster)
        self._planned_ahead: ScheduledStep | None = None  # the latest, until its end
        self.counts = Counts()
        self._news = Outbox(self.counts)

    @property
    def has_work(self) -> bool:
        """Something runs or waits to; what is being filled from elsewhere does neither."""
        return bool(self._roster.running) or len(self._roster.waiting) > 0

    @property
    def num_fetching(self) -> int:
        return len(self._roster.fetching)

    def add(
        self,
        request: GenerationRequest,
        seed: int,
        arrived_s: float = 0.0,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """`seed` counts where the request brings none; times are of any one clock."""
        check_request(request, self._limits, self._cache)
        names, num_uncached = self._new_names(request.cache_salt), 0
        if self._limits.max_overtake_s is not None:
            num_uncached = self._count_uncached(request, names)
        due = due_s(arrived_s, num_uncached, self._limits)
        own = request.params.seed
        seed = seed if own is None else own
        self._roster.add(request, seed, due, names, grammar, arrived_s)

    def _new_names(self, cache_salt: str) -> SequenceNames:
        root = root_name(self._limits.fingerprint, cache_salt)
        return SequenceNames(root, self._cache.block_size)

    def _count_uncached(self, request: GenerationRequest, names: SequenceNames) -> int:
        prompt = request.prompt_token_ids
        if request.params.prompt_logprobs is not None or not self._limits.prefix_caching:
            return len(prompt)
        return len(prompt) - self._cache.match(names.grow(prompt), len(prompt)).num_tokens

    def abort(self, request_id: RequestId) -> None:
        """Ends what still runs of a request; unknown ids are those that ended already."""
        if request_id in self._roster:
            self._roster.end(self._roster[request_id])

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        if request_id in self._roster:
            live = {s.choice: s for s in self._roster[request_id].live}
            if choice in live:
                self._roster.finish(live[choice])

    @property
    def limits(self) -> SchedulerLimits:
        return self._limits

    def end_fetch(
        self,
        reservation: Reservation,
        outcome: FetchOutcome,
        unfinished: Iterable[UnfinishedReads] = (),
        now_s: float = 0.0,
    ) -> tuple[StepOutput, Quarantined]:
        """A reservation's blocks are filled, or will not be; its holds are given back.

        Blocks of reads that have not ended stay in quarantine, a hold for each of them.
        """
        assert not (isinstance(outcome, Delivered) and tuple(unfinished)), "delivered in part"
        sequence, quarantined = self._fetches.end(reservation, unfinished)
        outbox = Outbox(self.counts, now_s)
        if sequence is not None:
            self._resume(sequence, reservation, outcome, outbox)
        return self._close(outbox), quarantined

    def _resume(
        self, sequence: Sequence, reservation: Reservation, outcome: FetchOutcome, outbox: Outbox
    ) -> None:
        match outcome:
            case Delivered():
                problem = find_problem(sequence, reservation, outcome, self._limits.vocab_size)
                if problem is not None:
                    outbox.fail(sequence.request, StepError(problem))
                elif not self._progress.deliver(sequence, reservation, outcome, outbox):
                    self._roster.retry(sequence, reservation.of_prefix, again=False)
            case Refetch() | ComputeHere():
                again = isinstance(outcome, Refetch)
                self._roster.retry(sequence, reservation.of_prefix, again)
            case FetchFailed(error):
                outbox.fail(sequence.request, error)

    def hold_cached(self, token_ids: Seq[int], cache_salt: str, first_token: int) -> HeldRange:
        """What is cached of a prompt from `first_token` on, held for a reader."""
        check_prompt(token_ids, cache_salt, self._limits)
        check_first_token(first_token, len(token_ids), self._cache.block_size)
        caching = self._limits.prefix_caching
        names = self._new_names(cache_salt).grow(token_ids) if caching else []
        return hold_cached(self._cache, names, len(token_ids), first_token)

    def schedule(self, now_s: float = 0.0, costs: StepCosts | None = None) -> ScheduledStep | None:
        """None when nothing can be computed before something else happens. No step is in flight.

        With `costs` prompts get so much of a step that others do not stand still for long.
        """
        self._news.now_s = now_s
        draft = Draft(self._limits, self._cache.block_size, costs)
        self._service.serve(draft, self._news)
        while not draft.full and self._admission.admit_next(draft, self._news):
            pass
        step = draft.finish(next(self._steps))
        if step is None:
            self._break_deadlock()
        return step

    def schedule_ahead(
        self, step: ScheduledStep, now_s: float = 0.0, costs: StepCosts | None = None
    ) -> ScheduledStep | None:
        """The step after the one that is in flight, before its tokens are known.

        Nobody is preempted for it. None where that step must end first, or nothing would follow.
        Completing it drops the samples of those that had ended when its tokens came.
        """
        self._news.now_s = now_s
        draft = Draft(self._limits, self._cache.block_size, costs)
        if not self._ahead.follow(step, draft):
            return None
        while self._ahead.may_admit() and self._admission.admit_next(draft, self._news):
            pass
        following = draft.finish(next(self._steps))
        if following is not None:
            self._planned_ahead = following
            self._roster.in_flight = frozenset([part.sequence for part in following.parts])
        return following

    def _end(self, step: ScheduledStep) -> None:
        """Nothing writes for it any more. The one that was planned while it was in flight, if
        any, still does."""
        if step is self._planned_ahead:
            self._planned_ahead, self._roster.in_flight = None, frozenset()
        self._roster.dismiss()

    def announce(self, step: ScheduledStep) -> None:
        """What the step writes of prompts that are handed over is there, before its end: that
        is in `take_news`, and not in what `complete` says."""
        for part in step.parts:
            if part.sequence.request.source.hand_over is not None:
                self._progress.announce(part, self._news)

    def take_news(self) -> StepOutput:
        """What need not wait for the step's end: reservations, chunks that are in the cache."""
        if self._news.is_empty:
            return NOTHING
        news, self._news = self._news, Outbox(self.counts)
        return news.output()

    def _break_deadlock(self) -> None:
        """Nothing can be computed, and blocks are held by nothing but announcements of prompts
        that are not at their end: the last of these fails, and its reader lets go."""
        handing = [request for request in self._roster.requests() if request.num_holds]
        held_by_them = sum(request.num_holds for request in handing)
        nobody_else = self._cache.transfers.num_active <= held_by_them
        if handing and nobody_else and not self.num_fetching:
            last = max(handing, key=lambda request: request.choices[0].key)
            self._news.fail(last, StepError("prompts that were begun at once do not fit"))
            self._roster.end(last)

    def complete(self, step: ScheduledStep, result: StepResult, now_s: float = 0.0) -> StepOutput:
        """Takes over what the runner drew.

        A request that nothing could be drawn for fails, and what its slice wrote is not named:
        it may not be finite. What it saw before may not be either, if that is why: an earlier
        chunk of it, or of whoever left it in the cache.
        """
        outbox = Outbox(self.counts, now_s)
        self._end(step)
        samples = iter(result.samples)
        for part in step.parts:
            drawn = list(islice(samples, len(part.draws)))
            if part.is_void:
                continue
            self.counts.num_drawn += len(drawn)
            problem = _find_problem(part, result)
            if problem is None:
                self._progress.take_over(part, drawn, result, outbox)
            else:
                outbox.fail(part.sequence.request, _error(problem, part.sequence.request.source))
                part.sequence.request.in_doubt |= problem == NOT_FINITE
        return self._close(outbox)

    def fail(self, step: ScheduledStep, error: EngineError) -> StepOutput:
        """The runner could not do the step: the requests in it end, the others go on."""
        outbox = Outbox(self.counts)
        self._end(step)
        for part in step.parts:
            if part.is_void:
                continue
            outbox.fail(part.sequence.request, error)
        for sequence in step.swapped:
            if sequence.state is SequenceState.SWAPPED:
                outbox.fail(sequence.request, error)
        return self._close(outbox)

    def _close(self, outbox: Outbox) -> StepOutput:
        """The step is over for the cache's subscribers too."""
        for request_id in outbox.failures:
            self.abort(request_id)
        self._cache.events.flush()
        return outbox.output()

    def stats(self) -> SchedulerStats:
        waiting = [s for s in self._roster.sequences() if s.state in QUEUED]
        drawing = [s for s in self._roster.running if s.num_uncomputed == 1]
        return SchedulerStats(
            num_running=len(self._roster.running),
            num_waiting=len(waiting),
            num_fetching=self.num_fetching,
            num_preemptions=self._service.num_preemptions,
            num_swapped_blocks=sum(self._swap.num_used),
            num_queued_tokens=sum(_num_queued(s) for s in (*waiting, *self._roster.running)),
            num_context_tokens=sum(s.num_computed for s in self._roster.running),
            num_drawing=len(drawing),
            num_drawing_context=sum(s.num_computed for s in drawing),
        )

    def figures(self) -> SchedulerFigures:
        """Each a plain number that is read in one go, so any thread may ask, at any time."""
        counts = self.counts
        return SchedulerFigures(
            len(self._roster.running),
            len(self._roster.waiting),
            self.num_fetching,
            self._service.num_preemptions,
            sum(self._swap.num_used),
            counts.num_computed,
            counts.num_cached,
            counts.num_pulled,
            counts.num_drawn,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between steps; for tests and for an idle engine."""
        self._roster.check_integrity()
        assert self._fetches.waiting == self._roster.fetching


def _num_queued(sequence: Sequence) -> int:
    """Tokens that it has still to compute before it decodes. One that waits is taken not to be
    cached: what it finds is known when it is admitted, and so is whether it is fetched."""
    if sequence.state is SequenceState.RUNNING:
        return sequence.num_uncomputed if sequence.num_uncomputed > 1 else 0
    above = sequence.request.source.fetch_above
    is_fetched = sequence.may_fetch and sequence.num_uncomputed > (above or 0)
    return 0 if is_fetched else sequence.num_uncomputed


def _find_problem(part: Part, result: StepResult) -> str | None:
    """Why nothing can be taken over of a part."""
    if not (result.failed_slots or result.prompt_logprobs):
        return None
    for slot in part.slice.samples:
        if slot in result.failed_slots:
            return result.failed_slots[slot]
    entries = result.prompt_logprobs.get(part.slice.slot, ())
    if any(math.isnan(entry.logprob) for entry in entries):
        return NOT_FINITE
    return None


def _error(problem: str, request: GenerationRequest) -> EngineError:
    """What forbids itself every token is the request's own doing, and so is a grammar that compiles
    and then grows too large."""
    if problem.startswith(GRAMMAR_FAILED):
        return RequestError("grammar", problem.removeprefix(GRAMMAR_FAILED))
    if problem != NO_TOKEN_LEFT:
        return StepError(problem)
    given = request.params.allowed_token_ids is not None
    return RequestError("allowed_token_ids" if given else "min_tokens", problem)
