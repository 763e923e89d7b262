"""What a step or a transfer has brought: blocks confirmed, tokens appended, ends found."""

from collections.abc import Sequence as Seq

from engine.handoff import Delivered, FirstToken, Reservation
from engine.request import PromptTimes
from engine.scheduler.draft import Part
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.outbox import Outbox, find_end
from engine.scheduler.roster import Roster
from engine.scheduler.sequence import Sequence
from engine.step import Sample, StepResult, TokenLogprobs
from kv_cache.cache import KvCache
from kv_cache.handover import HeldRange, first_query, hold_range, serves_from


class Progress:
    """Takes over results for one sequence at a time; it knows nothing of queue and budget."""

    def __init__(self, limits: SchedulerLimits, cache: KvCache, roster: Roster) -> None:
        self._limits = limits
        self._cache = cache
        self._roster = roster

    def announce(self, part: Part, outbox: Outbox) -> None:
        """Of a prompt that is handed over. The slice's keys and values are written; whether its
        tokens can be drawn is not known, so nothing of it may be named yet."""
        sequence = part.sequence
        assert sequence.request.source.hand_over is not None
        num_ready = sequence.num_computed + part.slice.num_tokens
        outbox.announce(sequence.request, announce(self._cache, sequence, num_ready))

    def take_over(
        self, part: Part, drawn: list[Sample], result: StepResult, outbox: Outbox
    ) -> None:
        """The slice's keys and values are written, and its tokens drawn."""
        sequence = part.sequence
        entries: Seq[TokenLogprobs] = ()
        if part.slice.prompt_logprobs is not None:
            entries = self._new_entries(part, result.prompt_logprobs[part.slice.slot])
        sequence.num_computed += part.slice.num_tokens
        if sequence.request.source.hand_over is not None:
            self._hand_on(sequence, entries, drawn, outbox)
            return
        self._confirm(sequence)
        for sibling in part.draws[1:]:
            self._roster.fork(sequence, sibling)
        for choice, sample in zip(part.draws, drawn, strict=True):
            self._append(choice, sample.token_id, sample.logprobs, outbox)

    def deliver(
        self, sequence: Sequence, reservation: Reservation, delivered: Delivered, outbox: Outbox
    ) -> bool:
        """The reserved blocks are filled. False, and nothing has changed: what has arrived of a
        prefix is of no use."""
        if reservation.of_prefix:
            transfer_s = delivered.times.transfer_s
            return self._deliver_prefix(sequence, delivered.end_of(reservation), transfer_s, outbox)
        self._deliver_prompt(sequence, reservation, delivered, outbox)
        return True

    def _deliver_prompt(
        self, sequence: Sequence, reservation: Reservation, delivered: Delivered, outbox: Outbox
    ) -> None:
        """As if the prompt's last chunk had been computed here.

        Without first tokens all but the last token is; that one is computed again, as after a
        hit of the whole prompt, and not written. What is cached here alone was computed again
        there, so it is the other side's number that counts.
        """
        request = sequence.request
        request.num_cached = min(
            delivered.num_cached_tokens, request.num_prompt, len(sequence.tokens) - 1
        )
        request.prompt_logprobs += delivered.prompt_logprobs
        course = request.course
        course.num_cached = min(reservation.held.start, request.num_prompt)
        course.num_pulled = request.num_prompt - course.num_cached
        course.elsewhere, course.whole = delivered.times, True
        self._run_from(sequence, len(sequence.tokens), draws=not delivered.first_tokens)
        self._confirm(sequence)
        if not delivered.first_tokens:
            return
        siblings = request.forking
        for sibling in siblings:
            self._roster.fork(sequence, sibling)
        for choice in (sequence, *siblings):
            token_id, logprobs = delivered.first_tokens[choice.choice]
            self._append(choice, token_id, logprobs, outbox)

    def _deliver_prefix(
        self, sequence: Sequence, end: int, transfer_s: float, outbox: Outbox
    ) -> bool:
        """The blocks of the tokens up to `end` are filled, as if they had been cached here.

        False, and nothing has changed: a shorter prefix than was reserved has arrived, and what
        is seen of a window from its end on is not there.
        """
        request, blocks = sequence.request, sequence.blocks
        assert blocks is not None
        if not serves_from(self._cache, blocks, min(end, len(sequence.tokens) - 1)):
            return False
        self._run_from(sequence, end, request.draws)
        request.num_cached = min(end, request.num_prompt, len(sequence.tokens) - 1)
        course = request.course
        course.num_pulled = max(0, request.num_cached - course.num_cached)
        course.elsewhere = PromptTimes(transfer_s=transfer_s)
        if request.source.hand_over is not None:
            outbox.announce(request, announce(self._cache, sequence, end))
        self._confirm(sequence)
        if end == request.num_prompt and not request.draws:
            outbox.end_prompt(request)
            self._roster.end(request)
        return True

    def _run_from(self, sequence: Sequence, end: int, draws: bool) -> None:
        """With `draws`, at least the last token is computed here."""
        sequence.may_fetch = sequence.may_fetch_prefix = False
        self._roster.end_fetch(sequence)
        sequence.num_written = end
        sequence.num_computed = min(end, len(sequence.tokens) - draws)

    def _new_entries(self, part: Part, entries: Seq[TokenLogprobs]) -> Seq[TokenLogprobs]:
        """Of the tokens from the slice's second on; what a preempted request had is skipped."""
        request = part.sequence.request
        known = len(request.prompt_logprobs) - (part.slice.start + 1)
        assert known >= 0, "a prompt logprob was left out"
        request.prompt_logprobs += entries[known:]
        return entries[known:]

    def _confirm(self, sequence: Sequence) -> None:
        """Full blocks get their names."""
        blocks = sequence.blocks
        assert blocks is not None
        if sequence.num_computed >= blocks.next_advance:
            caching = self._limits.prefix_caching
            names = sequence.names.grow(sequence.tokens) if caching else ()
            sequence.note(self._cache.advance(blocks, names, sequence.num_computed))

    def _append(
        self, choice: Sequence, token_id: int, logprobs: TokenLogprobs | None, outbox: Outbox
    ) -> None:
        choice.tokens.append(token_id)
        end = find_end(choice, self._limits.eos_token_ids)
        outbox.take(choice, token_id, logprobs, end)
        if end is not None:
            self._roster.finish(choice)

    def _hand_on(
        self, sequence: Sequence, entries: Seq[TokenLogprobs], drawn: list[Sample], outbox: Outbox
    ) -> None:
        """Held before `advance`, which frees what no query after the prompt's end sees."""
        request = sequence.request
        held = announce(self._cache, sequence, sequence.num_computed)
        outbox.announce(request, held, entries)
        self._confirm(sequence)
        if not sequence.num_uncomputed:
            outbox.end_prompt(request, [FirstToken(s.token_id, s.logprobs) for s in drawn])
            self._roster.end(request)


def announce(cache: KvCache, sequence: Sequence, num_ready: int) -> HeldRange:
    """Holds what is ready of a prompt and was not announced before, in whole blocks but for
    the prompt's end."""
    request, size = sequence.request, cache.block_size
    assert sequence.blocks is not None
    start, end = request.num_announced, num_ready
    if end < request.num_prompt:
        end -= end % size
    end = max(start, end)
    query = first_query(request.num_prompt, size)
    held = hold_range(cache, sequence.blocks, start, end, query)
    request.num_announced = end
    request.num_holds += len(held.holds)
    return held
