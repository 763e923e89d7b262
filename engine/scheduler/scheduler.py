"""Which tokens the next step computes, for whom, and in which blocks."""

import math
from dataclasses import dataclass
from itertools import count, islice

from engine.errors import EngineError, StepError
from engine.request import GenerationRequest, RequestId
from engine.scheduler.draft import Draft, Part, ScheduledStep, make_part
from engine.scheduler.limits import SchedulerLimits, check_request
from engine.scheduler.outbox import Outbox, StepOutput, find_end
from engine.scheduler.roster import Roster
from engine.scheduler.sequence import QUEUED, Sequence, SequenceState
from engine.scheduler.swap import SwapSpace
from engine.step import NOT_FINITE, BlockCopy, Sample, StepResult
from kv_cache.cache import KvCache
from kv_cache.names import BlockName
from kv_cache.tree import Match


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_swapped_blocks: int
    num_queued_tokens: int  # to be computed by sequences that wait


class Scheduler:
    """Continuous batching over a paged cache; plain data in, plain data out.

    `add`, `abort` and `stop_choice` are called between steps only. A step goes `schedule` ->
    (the runner) -> `complete` or `fail`. Running sequences are served first, one token each
    before prompt chunks; waiting ones are admitted, in order, when their whole prompt and one
    more block fit. When a running sequence finds no block, the one that would be served last
    gives up its own; the first in line never does, so what was admitted ends.
    """

    def __init__(self, limits: SchedulerLimits, cache: KvCache, swap: SwapSpace) -> None:
        self._limits = limits
        self._cache = cache
        self._swap = swap
        self._roster = Roster(limits, cache, swap)
        self._steps = count(1)
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return len(self._roster) > 0

    def add(self, request: GenerationRequest, seed: int) -> None:
        """`seed` counts where the request brings none."""
        check_request(request, self._limits, self._cache)
        own = request.params.seed
        self._roster.add(request, seed if own is None else own)

    def abort(self, request_id: RequestId) -> None:
        """Ends what still runs of a request; unknown ids are those that ended already."""
        if request_id in self._roster:
            for sequence in reversed(self._roster[request_id].choices):
                if sequence.state is not SequenceState.FINISHED:
                    self._roster.finish(sequence)

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        if request_id in self._roster:
            live = {s.choice: s for s in self._roster[request_id].live}
            if choice in live:
                self._roster.finish(live[choice])

    def schedule(self) -> ScheduledStep | None:
        """None when nothing can be computed now."""
        draft = Draft(self._limits.max_num_batched_tokens)
        self._schedule_running(draft)
        if not draft.preempted:
            while draft.budget > 0 and self._admit_next(draft):
                pass
        return draft.finish(next(self._steps))

    def _schedule_running(self, draft: Draft) -> None:
        running = self._roster.running
        decoding = [s for s in running if s.num_uncomputed == 1]
        reading = [s for s in running if s.num_uncomputed > 1]
        for sequence in decoding + reading:
            if draft.budget == 0:
                return
            if sequence.state is SequenceState.RUNNING:
                num_tokens = min(sequence.num_uncomputed, draft.budget)
                copies = self._make_room(sequence, num_tokens, draft)
                if copies is not None:
                    draft.add(make_part(sequence, num_tokens, copies))

    def _make_room(
        self, sequence: Sequence, num_tokens: int, draft: Draft
    ) -> list[BlockCopy] | None:
        """Blocks of its own for what the sequence writes next; None when it gave up itself."""
        blocks = sequence.blocks
        assert blocks is not None
        end = sequence.num_computed + num_tokens
        if end <= blocks.capacity and not blocks.may_share:
            return []
        while True:
            changes = self._cache.extend(blocks, end)
            if changes is not None:
                sequence.note(changes)
                copied = self._cache.make_writable(blocks, sequence.num_computed)
                if copied is not None:
                    sequence.note([(c.group, c.entry, c.target) for c in copied])
                    return [BlockCopy(c.group, c.source, c.target) for c in copied]
            victim = self._roster.running[-1]
            self._preempt(victim, draft)
            if victim is sequence:
                return None

    def _admit_next(self, draft: Draft) -> bool:
        """The first in line gets blocks for its whole prompt, a slot, and a first chunk."""
        sequence = self._roster.waiting.peek()
        if sequence is None:
            return False
        request = sequence.request
        if 1 + len(request.forking) > self._roster.num_free_slots:
            return False
        num_tokens = len(sequence.tokens)
        match = self._cache.match(self._readable_names(sequence), num_tokens)
        if not self._cache.fits(match, num_tokens):
            return False
        resumed = request.num_cached is not None
        priority = request.source.priority
        self._roster.start(sequence, self._cache.open(match, priority=priority, resumed=resumed))
        if not resumed:
            request.num_cached = match.num_tokens
        sequence.num_computed = max(sequence.num_computed, match.num_tokens)
        sequence.num_written = max(sequence.num_computed, match.num_cached)
        self._read_first_chunk(sequence, match, draft)
        return True

    def _readable_names(self, sequence: Sequence) -> list[BlockName]:
        if not self._limits.prefix_caching:
            return []
        names = sequence.names.grow(sequence.tokens)
        readable = sequence.request.num_readable
        return names if readable is None else names[: readable // self._cache.block_size]

    def _read_first_chunk(self, sequence: Sequence, match: Match, draft: Draft) -> None:
        blocks, start = sequence.blocks, sequence.num_computed
        assert blocks is not None
        num_tokens = min(sequence.num_uncomputed, draft.budget)
        changes = self._cache.extend(
            blocks,
            start + num_tokens,
            reserve_tokens=len(sequence.tokens),
            computed=start if sequence.host_blocks else 0,
        )
        assert changes is not None, "what fits can be extended"
        if sequence.host_blocks:
            draft.swap_in += self._swap.bring_back(sequence, match.num_blocks)
        draft.add(make_part(sequence, num_tokens, []))

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        """Takes blocks and slot; what was computed goes to the host where that has room."""
        part = draft.drop(victim)
        draft.preempted = True
        self._num_preemptions += 1
        state = SequenceState.WAITING
        # a copy of this very step has not run yet, so there is nothing to take out
        if not victim.request.forking and not (part and part.copies):
            copies = self._swap.take_out(victim, self._cache.block_size)
            if copies is not None:
                draft.swap_out += copies
                draft.swapped.append(victim)
                state = SequenceState.SWAPPED
        self._roster.requeue(victim, state)

    def complete(self, step: ScheduledStep, result: StepResult) -> StepOutput:
        """Takes over what the runner drew.

        A request that nothing could be drawn for fails, and what its slice wrote is not named:
        it may not be finite.
        """
        outbox = Outbox()
        samples = iter(result.samples)
        for part in step.parts:
            drawn = list(islice(samples, len(part.draws)))
            problem = _find_problem(part, result)
            if problem is None:
                self._take_over(part, drawn, result, outbox)
            else:
                outbox.fail(part.sequence.request, StepError(problem))
        return self._close(outbox)

    def _take_over(
        self, part: Part, drawn: list[Sample], result: StepResult, outbox: Outbox
    ) -> None:
        sequence = part.sequence
        self._commit(part)
        if part.slice.prompt_logprobs is not None:
            entries = result.prompt_logprobs[part.slice.slot]
            outbox.take_prompt_logprobs(sequence.request, part.slice.start, entries)
        for sibling in part.draws[1:]:
            self._roster.fork(sequence, sibling)
        for choice, sample in zip(part.draws, drawn, strict=True):
            choice.tokens.append(sample.token_id)
            end = find_end(choice, self._limits.eos_token_ids)
            outbox.take(choice, sample, end)
            if end is not None:
                self._roster.finish(choice)

    def _commit(self, part: Part) -> None:
        """The slice's keys and values are written: full blocks get their names."""
        sequence = part.sequence
        blocks = sequence.blocks
        assert blocks is not None
        sequence.num_computed += part.slice.num_tokens
        if sequence.num_computed >= blocks.next_advance:
            caching = self._limits.prefix_caching
            names = sequence.names.grow(sequence.tokens) if caching else ()
            sequence.note(self._cache.advance(blocks, names, sequence.num_computed))

    def fail(self, step: ScheduledStep, error: EngineError) -> StepOutput:
        """The runner could not do the step: the requests in it end, the others go on."""
        outbox = Outbox()
        for part in step.parts:
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
        return SchedulerStats(
            num_running=len(self._roster.running),
            num_waiting=len(waiting),
            num_preemptions=self._num_preemptions,
            num_swapped_blocks=sum(self._swap.num_used),
            num_queued_tokens=sum(s.num_uncomputed for s in waiting),
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between steps; for tests and for an idle engine."""
        self._roster.check_integrity()


def _find_problem(part: Part, result: StepResult) -> str | None:
    """Why nothing can be taken over of a part."""
    for slot in part.slice.samples:
        if slot in result.failed_slots:
            return result.failed_slots[slot]
    entries = result.prompt_logprobs.get(part.slice.slot, ())
    if any(math.isnan(entry.logprob) for entry in entries):
        return NOT_FINITE
    return None
