"""Those that run get their next tokens, and the blocks to write them to."""

from engine.scheduler.admission import Admission
from engine.scheduler.draft import Draft, make_next_part, make_part
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.outbox import Outbox
from engine.scheduler.roster import Roster
from engine.scheduler.sequence import Sequence, SequenceState
from engine.scheduler.swap import SwapSpace
from engine.step import BlockCopy
from kv_cache.cache import KvCache


class Service:
    """Serves running sequences, and takes from the last of them what the others lack."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: KvCache,
        swap: SwapSpace,
        roster: Roster,
        admission: Admission,
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._swap = swap
        self._roster = roster
        self._admission = admission
        self.num_preemptions = 0

    def serve(self, draft: Draft, outbox: Outbox) -> None:
        running = self._roster.running
        decoding = [s for s in running if s.num_uncomputed == 1]
        reading = [s for s in running if s.num_uncomputed > 1]
        for sequence in decoding:
            if draft.budget and _goes_on(sequence):
                draft.add(make_next_part(sequence, sequence.num_computed))
            else:
                self._serve(sequence, draft)
        if reading or self._roster.waiting:
            draft.begin_prompts()
        for sequence in reading:
            self._admit_before(sequence, draft, outbox)
            self._serve(sequence, draft)

    def _admit_before(self, sequence: Sequence, draft: Draft, outbox: Outbox) -> None:
        """A shorter prompt need not wait for the end of a long one that has begun."""
        if self._limits.max_overtake_s is None:
            return
        waiting = self._roster.waiting
        while not draft.full and (first := waiting.peek()) and first < sequence:
            if not self._admission.admit_next(draft, outbox):
                return

    def _serve(self, sequence: Sequence, draft: Draft) -> None:
        if sequence.state is not SequenceState.RUNNING:
            return
        num_tokens = draft.most(sequence.num_computed, sequence.num_uncomputed)
        if num_tokens:
            copies = self._make_room(sequence, num_tokens, draft)
            if copies is not None:
                draft.add(make_part(sequence, num_tokens, copies))

    def _make_room(
        self, sequence: Sequence, num_tokens: int, draft: Draft
    ) -> list[BlockCopy] | None:
        """Blocks of its own for what the sequence writes next; None when it has to wait."""
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
            draft.full = True
            victim = self._roster.running[-1]
            if victim is self._roster.running[0]:
                return None
            self._preempt(victim, draft)
            if victim is sequence:
                return None

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        """Takes blocks and slot; what was computed goes to the host where that has room."""
        part = draft.drop(victim)
        self.num_preemptions += 1
        state = SequenceState.WAITING
        # a copy of this very step has not run yet, so there is nothing to take out; and where
        # somebody comes back in it, his place on the host, which is free now, is read after that
        if not (victim.request.forking or draft.swap_in or (part and part.copies)):
            copies = self._swap.take_out(victim, self._cache.block_size)
            if copies is not None:
                draft.swap_out += copies
                draft.swapped.append(victim)
                state = SequenceState.SWAPPED
        self._roster.requeue(victim, state)


def _goes_on(sequence: Sequence) -> bool:
    """Most of those that decode do: they are nobody's leader, the runner knows their slots, and
    there is room for one more token in blocks of their own."""
    request, blocks = sequence.request, sequence.blocks
    return (
        blocks is not None
        and sequence.num_computed < blocks.capacity
        and not blocks.may_share
        and not sequence.enters
        and request.draws
        and not request.forking
        and request.source.params.prompt_logprobs is None
    )
