"""The step after one that is in flight: nobody knows yet what that one draws."""

from collections.abc import Iterable

from engine.scheduler.draft import Draft, Part, ScheduledStep, make_next_part, make_part
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.roster import Roster
from engine.scheduler.sequence import Sequence, SequenceState
from kv_cache.cache import KvCache
from kv_cache.names import BlockName


class Ahead:
    """Those that run get their next token if that takes nothing from anyone, and nothing that
    the device still reads would be given away when the step in flight has ended.

    Who will have ended by then, by a token that nobody foresees, has a part all the same. Each
    part is one sequence's alone: choices that are still to be forked wait.
    """

    def __init__(self, limits: SchedulerLimits, cache: KvCache, roster: Roster) -> None:
        self._limits = limits
        self._cache = cache
        self._roster = roster

    def follow(self, step: ScheduledStep, draft: Draft) -> bool:
        """False, and nothing is planned, where the step in flight must end first."""
        parts = [p for p in step.parts if p.sequence.state is SequenceState.RUNNING]
        if self._fork_waits() or not all(map(_draws_on, parts)) or self._switches(parts):
            return False
        if self._roster.doubts:  # whoever came now would find it, and hold it for the next one
            return False
        going_on = [p.sequence for p in parts if not _ends(p.sequence)]
        others = self._others(parts)
        if not all(self._has_room(s, len(s.tokens) + 1) for s in going_on):
            return False
        if not all(self._has_room(s, s.num_computed + _chunk(s, draft)) for s in others):
            return False
        for sequence in going_on:
            draft.add(make_next_part(sequence, len(sequence.tokens)))
        reading = [s for s in others if s.num_uncomputed > 1]
        self._add([s for s in others if s.num_uncomputed == 1], draft)
        if reading or self._roster.waiting:
            draft.begin_prompts()
        self._add(reading, draft)
        return True

    @staticmethod
    def _add(sequences: Iterable[Sequence], draft: Draft) -> None:
        for sequence in sequences:
            if num_tokens := _chunk(sequence, draft):
                draft.add(make_part(sequence, num_tokens, []))

    def may_admit(self) -> bool:
        """Whether the first in line would be in flight alone."""
        first = self._roster.waiting.peek()
        return first is not None and not first.request.forking

    def _fork_waits(self) -> bool:
        first = self._roster.waiting.peek()
        forking = () if first is None else first.request.forking
        return 0 < len(forking) < self._roster.num_free_slots

    def _others(self, parts: list[Part]) -> list[Sequence]:
        """Those that run and are not in flight: their blocks have just come from elsewhere."""
        running = self._roster.running
        if len(parts) == len(running):
            return []
        seen = {part.sequence for part in parts}
        return [sequence for sequence in running if sequence not in seen]

    def _has_room(self, sequence: Sequence, end: int) -> bool:
        blocks = sequence.blocks
        assert blocks is not None
        if blocks.may_share or sequence.request.forking:
            return False
        if end > blocks.capacity:
            changes = self._cache.extend(blocks, end)
            if changes is None:
                return False
            sequence.note(changes)
        return True

    def _switches(self, parts: Iterable[Part]) -> bool:
        """Whether a block that is being filled will have a name that another block has. Then
        its sequence switches to that one, and its own could be filled by a peer's bytes while
        the device reads it."""
        if not self._limits.prefix_caching:
            return False
        filled = [name for part in parts for name in self._filled(part)]
        known = self._cache.knows
        return len(set(filled)) < len(filled) or any(map(known, filled))

    def _filled(self, part: Part) -> Iterable[BlockName]:
        sequence, blocks = part.sequence, part.sequence.blocks
        assert blocks is not None
        end = part.slice.start + part.slice.num_tokens
        if end < blocks.next_advance:
            return ()
        names = sequence.names.grow(sequence.tokens)
        return names[blocks.num_named : end // self._cache.block_size]


def _draws_on(part: Part) -> bool:
    """Draws its own next token, and the host need not know it for the one after: a grammar
    must, and a prompt that is handed over ends there."""
    request = part.sequence.request
    return (
        len(part.draws) == 1
        and part.slice.prompt_logprobs is None
        and request.grammar is None
        and request.source.hand_over is None
    )


def _ends(sequence: Sequence) -> bool:
    """The token that is being drawn is its last, whichever it is."""
    request = sequence.request
    return len(sequence.tokens) + 1 - request.num_prompt >= request.max_tokens


def _chunk(sequence: Sequence, draft: Draft) -> int:
    return draft.most(sequence.num_computed, sequence.num_uncomputed)
