"""A step under construction: which sequences it computes and what that changes."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.pace import Pace
from engine.scheduler.sequence import Sequence, SequenceState
from engine.step import (
    BlockCopy,
    EnteringSequence,
    HostCopy,
    Slice,
    StepPlan,
    TableUpdate,
)
from engine.step_times import StepCosts


@dataclass(slots=True)
class Part:
    """One sequence's share of a step."""

    sequence: Sequence
    slice: Slice
    draws: tuple[Sequence, ...]  # who draws from its last logits
    updates: Seq[TableUpdate] = ()
    copies: Seq[BlockCopy] = ()
    entering: Seq[EnteringSequence] = ()

    @property
    def is_void(self) -> bool:
        """The sequence ended after this was planned."""
        return self.sequence.state is SequenceState.FINISHED


def make_part(sequence: Sequence, num_tokens: int, copies: Seq[BlockCopy]) -> Part:
    """The next `num_tokens` of a sequence; takes over what the runner has not been told yet."""
    request = sequence.request
    start = sequence.num_computed
    draws: tuple[Sequence, ...] = ()
    entering = []
    if start + num_tokens == len(sequence.tokens) and request.draws:
        draws = (sequence, *request.forking)
        entering = [_entering(sibling) for sibling in draws[1:]]
    if sequence.enters:
        entering.append(_entering(sequence))
        sequence.enters = False
        sequence.changes.clear()
    updates = sequence.changes
    sequence.changes = []
    part = Slice(
        sequence.own_slot,
        start,
        num_tokens,
        max(start, sequence.num_written),
        tuple([one.own_slot for one in draws]),
        request.source.params.prompt_logprobs if request.wants_prompt_logprobs else None,
    )
    return Part(sequence, part, draws, updates, copies, entering)


def make_next_part(sequence: Sequence, start: int) -> Part:
    """The token `start`, from which the sequence alone draws; or, of one in flight, the token that
    is being drawn, whichever it is."""
    assert not sequence.enters
    slot = sequence.own_slot
    updates, sequence.changes = sequence.changes, []
    part = Slice(slot, start, 1, max(start, sequence.num_written), (slot,))
    return Part(sequence, part, (sequence,), updates)


def _entering(sequence: Sequence) -> EnteringSequence:
    """Everything about a slot; one that is yet to be forked has no tables of its own."""
    tables = () if sequence.blocks is None else sequence.blocks.tables
    return EnteringSequence(
        slot=sequence.own_slot,
        token_ids=sequence.tokens.copy(),
        num_prompt_tokens=sequence.request.num_prompt,
        params=sequence.params,
        seed=sequence.request.seed,
        choice=sequence.choice,
        tables=tuple([table.copy() for table in tables]),
        grammar=sequence.request.grammar,
    )


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan, and the sequences behind its numbers for when the result comes back."""

    plan: StepPlan
    parts: tuple[Part, ...]
    swapped: tuple[Sequence, ...]  # preempted in this step, their blocks on the way to the host


class Draft:
    """Parts in the order in which they were scheduled; a preempted sequence's part can go."""

    def __init__(
        self, limits: SchedulerLimits, block_size: int, costs: StepCosts | None = None
    ) -> None:
        """Without costs a step takes what it takes."""
        self.budget = limits.max_num_batched_tokens
        self._max_pause_s = limits.max_pause_s
        self._block_size = block_size
        self._costs = costs
        self._pace: Pace | None = None
        self.full = False  # someone found no block: nobody is admitted
        self.swap_out: list[HostCopy] = []
        self.swap_in: list[HostCopy] = []
        self.swapped: list[Sequence] = []
        self._parts: dict[Sequence, Part] = {}

    def most(self, start: int, wanted: int) -> int:
        """Tokens of a prompt that are computed in this step."""
        wanted = min(wanted, self.budget)
        return wanted if self._pace is None else self._pace.most(start, wanted)

    def add(self, part: Part) -> None:
        self._parts[part.sequence] = part
        self.budget -= part.slice.num_tokens
        if self._pace is not None:
            self._pace.take(part.slice.start, part.slice.num_tokens)

    def drop(self, sequence: Sequence) -> Part | None:
        """Its token stays counted: who comes after it in this step gets no more for that."""
        return self._parts.pop(sequence, None)

    def begin_prompts(self) -> None:
        """Whoever is in it by now draws a token; nobody else's prompt holds them up for long."""
        if self._costs is not None:
            starts = [part.slice.start for part in self._parts.values()]
            self._pace = Pace(
                self._costs, self._max_pause_s, self._block_size, len(starts), sum(starts)
            )

    def finish(self, step: int) -> ScheduledStep | None:
        """None when there is nothing to do."""
        if not self._parts and not self.swap_out:
            return None
        decode = [p for p in self._parts.values() if p.slice.num_tokens == 1]
        parts = decode + [p for p in self._parts.values() if p.slice.num_tokens > 1]
        plan = StepPlan(
            step=step,
            slices=tuple([p.slice for p in parts]),
            num_decode=len(decode),
            num_tokens=sum([p.slice.num_tokens for p in parts]),
            entering=tuple([e for p in parts for e in p.entering]),
            updates=tuple([u for p in parts for u in p.updates]),
            copies=tuple([c for p in parts for c in p.copies]),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
        )
        return ScheduledStep(plan, tuple(parts), tuple(self.swapped))
