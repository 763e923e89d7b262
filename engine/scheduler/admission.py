"""The first in line gets what it needs to run: a slot, and blocks for its whole prompt."""

from engine.scheduler.draft import Draft, make_part
from engine.scheduler.fetches import Fetches
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.outbox import Outbox
from engine.scheduler.progress import announce
from engine.scheduler.roster import Roster
from engine.scheduler.sequence import Sequence
from engine.scheduler.swap import SwapSpace
from kv_cache.cache import KvCache
from kv_cache.handover import first_query, hold_range
from kv_cache.names import BlockName
from kv_cache.tree import Match


class Admission:
    """Decides whether and how a sequence begins; who is next is the queue's business."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: KvCache,
        swap: SwapSpace,
        roster: Roster,
        fetches: Fetches,
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._swap = swap
        self._roster = roster
        self._fetches = fetches

    def admit_next(self, draft: Draft, outbox: Outbox) -> bool:
        """Whether the first in line left the queue: to compute, to be filled, or done."""
        sequence = self._roster.waiting.peek()
        if sequence is None or draft.budget == 0:
            return False
        request = sequence.request
        if 1 + len(request.forking) > self._roster.num_free_slots:
            return False
        num_tokens = len(sequence.tokens)
        match = self._cache.match(self._readable_names(sequence), num_tokens)
        if not self._cache.fits(match, num_tokens):
            return False
        prefix_end = _prefix_end(sequence, match)
        cached_to = max(match.num_cached, prefix_end)
        above = request.source.fetch_above or 0
        is_fetched = sequence.may_fetch and num_tokens - cached_to > above
        if not (is_fetched or prefix_end or self._may_begin(sequence, match, draft)):
            return False
        if not request.has_begun:
            request.num_cached = min(match.num_tokens, request.num_prompt)
            request.course.num_cached = request.num_cached
            request.course.begin(outbox.now_s)
        if is_fetched:
            self._reserve(sequence, match, outbox)
        elif prefix_end:
            self._reserve_prefix(sequence, match, prefix_end, outbox)
        else:
            sequence.may_fetch = sequence.may_fetch_prefix = False
            self._start(sequence, match, draft, outbox)
        return True

    @staticmethod
    def _may_begin(sequence: Sequence, match: Match, draft: Draft) -> bool:
        """Whether there is time left for a piece of it."""
        start = max(sequence.num_computed, match.num_tokens)
        return draft.most(start, len(sequence.tokens) - start) > 0

    def _readable_names(self, sequence: Sequence) -> list[BlockName]:
        if not self._limits.prefix_caching:
            return []
        names = sequence.names.grow(sequence.tokens)
        readable = sequence.request.num_readable
        return names if readable is None else names[: readable // self._cache.block_size]

    def _reserve(self, sequence: Sequence, match: Match, outbox: Outbox) -> None:
        """Blocks for the whole prompt and one more token; what is missing is held for transfers."""
        num_tokens = len(sequence.tokens)
        query = first_query(num_tokens, self._cache.block_size)
        blocks = self._cache.open(match, priority=sequence.request.source.priority)
        self._roster.start_fetch(sequence, blocks)
        changes = self._cache.extend(blocks, num_tokens + 1, computed=query)
        assert changes is not None, "what fits can be extended"
        held = hold_range(self._cache, blocks, match.num_cached, num_tokens, query)
        outbox.reserve(self._fetches.begin(sequence, held, of_prefix=False))

    def _reserve_prefix(self, sequence: Sequence, match: Match, end: int, outbox: Outbox) -> None:
        """As for a prompt that is computed here, but the prefix is held for transfers.

        Of window groups that is what is seen from the prefix's own end on.
        """
        num_tokens = len(sequence.tokens)
        query = min(end, num_tokens - 1)
        blocks = self._cache.open(match, priority=sequence.request.source.priority)
        self._roster.start_fetch(sequence, blocks)
        changes = self._cache.extend(blocks, end, reserve_tokens=num_tokens, computed=query)
        assert changes is not None, "what fits can be extended"
        held = hold_range(self._cache, blocks, match.num_cached, end, query)
        outbox.reserve(self._fetches.begin(sequence, held, of_prefix=True))

    def _start(self, sequence: Sequence, match: Match, draft: Draft, outbox: Outbox) -> None:
        request = sequence.request
        self._roster.start(sequence, self._cache.open(match, priority=request.source.priority))
        sequence.num_computed = max(sequence.num_computed, match.num_tokens)
        sequence.num_written = max(sequence.num_computed, match.num_cached)
        if request.source.hand_over is not None:
            outbox.announce(request, announce(self._cache, sequence, match.num_cached))
            if match.num_cached == request.num_prompt and not request.draws:
                outbox.end_prompt(request)
                self._roster.end(request)
                return
        self._read_first_chunk(sequence, match, draft)

    def _read_first_chunk(self, sequence: Sequence, match: Match, draft: Draft) -> None:
        blocks, start = sequence.blocks, sequence.num_computed
        assert blocks is not None
        num_tokens = draft.most(start, sequence.num_uncomputed)
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


def _prefix_end(sequence: Sequence, match: Match) -> int:
    """Where the prefix ends that is worth fetching; 0: there is none. Prompt logprobs read no
    cache, this one's or another's."""
    prefix = sequence.request.source.prefix
    if prefix is None or not sequence.may_fetch_prefix or sequence.request.wants_prompt_logprobs:
        return 0
    return prefix.num_tokens if prefix.num_tokens - match.num_cached > prefix.above else 0
