"""What one worker holds, as its events say it, and what it is about to hold. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

from kv_cache.events import EventBatch, Snapshot
from router.depth import closed_depth, window_depth, window_reach
from router.held import BadEvents, Held
from router.predictions import Predictions
from router.workers import CacheShape

# Of a worker that has not said how much it holds.
UNKNOWN_CAPACITY = 1 << 20


class Outcome(StrEnum):
    """Of a batch or of a part of a snapshot."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"  # it was applied before
    PART = "part"  # of a snapshot, of which more is to come
    GAP = "gap"  # batches before it are missing
    INCARNATION = "incarnation"  # of another process: what the last one held is forgotten
    DIGEST = "digest"  # what is held here is not what the worker holds
    OVERFULL = "overfull"  # more than the worker has room for
    BAD_EVENTS = "bad_events"  # that cannot be

    @property
    def needs_snapshot(self) -> bool:
        """The worker is to be followed anew, from `WorkerIndex.resume()` on."""
        return self not in (Outcome.APPLIED, Outcome.DUPLICATE, Outcome.PART)


class Position(NamedTuple):
    """The last batch that counts; of no incarnation where a snapshot must come first."""

    incarnation: int = 0
    number: int = 0


class Match(NamedTuple):
    """What a worker has of a prompt's beginning, or will have soon, in blocks."""

    num_blocks: int = 0
    num_held: int = 0  # as it said: the rest is predicted


NOTHING = Match()


class WorkerIndex:
    """Follows one group of layers of one worker, in sequence. Doubt never empties it: entries
    that may be wrong cost time, none at all cost more. Only a new process and too many entries
    do."""

    def __init__(self, shape: CacheShape, capacity: int = UNKNOWN_CAPACITY) -> None:
        self.capacity = capacity  # blocks of the group
        self.counts: Counter[Outcome] = Counter()
        self.group = shape.group
        self._window = shape.window
        self._reach = window_reach(shape.window or 1, shape.block_size)
        self._held = Held(shape.group)
        self._predicted = Predictions()
        self._incarnation = 0
        self._number = 0
        self._doubt: Outcome | None = Outcome.INCARNATION  # why a snapshot must come first
        self._parts: tuple[Position, Held] | None = None  # of a snapshot

    def __len__(self) -> int:
        return len(self._held)

    def resume(self) -> Position:
        """Where the stream is to begin that is opened next."""
        self._parts = None
        return Position(self._incarnation, self._number) if self._doubt is None else Position()

    def apply(self, batch: EventBatch) -> Outcome:
        """BadEvents, too, leave the index to a snapshot; so below."""
        with self._distrusting():
            self._check_groups(batch.digests)
            outcome = self._place(batch)
            if outcome is Outcome.APPLIED:
                outcome = self._change(batch)
        self.counts[outcome] += 1
        return outcome

    def apply_part(self, part: Snapshot, complete: bool) -> Outcome:
        """Parts come in order and count all at once, when the last one is there."""
        with self._distrusting():
            self._check_groups(part.digests)
            outcome = self._collect(part, complete)
        self.counts[outcome] += 1
        return outcome

    @contextmanager
    def _distrusting(self) -> Iterator[None]:
        try:
            yield
        except BadEvents:
            self.distrust()
            raise

    def distrust(self) -> None:
        """What came was no message of events."""
        self.counts[Outcome.BAD_EVENTS] += 1
        self._doubt = Outcome.BAD_EVENTS
        self._parts = None

    def forget(self) -> None:
        self._held.clear()
        self._predicted.clear()
        self._incarnation = self._number = 0
        self._doubt = Outcome.INCARNATION
        self._parts = None

    def predict(self, keys: Sequence[int], until: float) -> None:
        """A prompt was sent there: what is not held of it will be, soon. In a window group, where
        what is held need not begin at the beginning, all of it, and until then."""
        num_held = closed_depth(keys, self._held.keys) if self._window is None else 0
        self._predicted.add(keys[num_held:], until, self.capacity)

    def match(self, keys: Sequence[int], now: float) -> Match:
        """Of a prompt whose full blocks have `keys`."""
        if self._predicted.soonest <= now:
            self._predicted.purge(now)
        return self._match_closed(keys) if self._window is None else self._match_window(keys)

    def _match_closed(self, keys: Sequence[int]) -> Match:
        held, predicted = self._held, self._predicted
        num_held = num_blocks = closed_depth(keys, held.keys)
        if num_held < len(keys) and keys[num_held] in predicted.next:
            num_blocks = predicted.depth(keys, num_held)
        return Match(num_blocks, num_held) if num_blocks else NOTHING

    def _match_window(self, keys: Sequence[int]) -> Match:
        num_held = window_depth(keys, self._held.keys, self._reach)
        num_blocks = max(num_held, self._predicted.depth(keys, 0))
        return Match(num_blocks, num_held) if num_blocks else NOTHING

    def _check_groups(self, digests: Sequence[int]) -> None:
        if len(digests) <= self.group:
            raise BadEvents(f"digests: of {len(digests)} groups, {self.group} is followed")

    def _place(self, batch: EventBatch) -> Outcome:
        if batch.incarnation != self._incarnation:
            self._begin(batch.incarnation)
            if batch.number == 1:  # its first words: nothing before them could be missing
                self._doubt = None
        if self._doubt is not None:
            return self._doubt
        if batch.number <= self._number:
            return Outcome.DUPLICATE
        return Outcome.APPLIED if batch.number == self._number + 1 else Outcome.GAP

    def _begin(self, incarnation: int) -> None:
        """What was predicted before the worker's first word still holds."""
        if self._incarnation:
            self.forget()
        self._incarnation = incarnation

    def _change(self, batch: EventBatch) -> Outcome:
        stored = self._held.apply(batch.events, len(batch.digests))
        self._number = batch.number
        if self._window is None:
            self._predicted.confirm(stored)
        if len(self._held) > self.capacity:
            return self._overfull()
        if self._held.digest != batch.digests[self.group]:
            self._doubt = Outcome.DIGEST
        return self._doubt or Outcome.APPLIED

    def _collect(self, part: Snapshot, complete: bool) -> Outcome:
        if part.incarnation != self._incarnation:
            self._begin(part.incarnation)
        elif self._doubt is None and part.number < self._number:
            return Outcome.DUPLICATE
        position = Position(part.incarnation, part.number)
        if self._parts is None or self._parts[0] != position:
            self._parts = position, Held(self.group)
        held = self._parts[1]
        held.load(part.stored, len(part.digests))
        if len(held) > self.capacity:
            return self._overfull()
        return self._install(part, held) if complete else Outcome.PART

    def _install(self, part: Snapshot, held: Held) -> Outcome:
        self._parts = None
        if held.digest != part.digests[self.group]:
            self._doubt = Outcome.DIGEST
            return Outcome.DIGEST
        self._held = held
        self._number, self._doubt = part.number, None
        if self._window is None:
            self._predicted.confirm_held(held.keys)
        return Outcome.APPLIED

    def _overfull(self) -> Outcome:
        """What does not fit is not what the worker holds, and the index is bounded."""
        self.forget()
        self._doubt = Outcome.OVERFULL
        return Outcome.OVERFULL
