"""What a worker's cache stores and gives up, told to whoever keeps an index of it.

One batch a step, numbered from 1 without holes. A subscriber asks for the batches after the
last one it applied; if they are gone, or the incarnation is another, it starts again from a
snapshot. The digests say whether its index is right.
"""

import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kv_cache.names import BlockName

DIGEST_MODULUS = 2**64


def new_incarnation() -> int:
    """Of whoever begins. Never 0, which stands for whoever is there."""
    return secrets.randbelow(2**63 - 1) + 1


class Stored(NamedTuple):
    """The blob (name, group) can be had here; the parent of a first block is None."""

    name: BlockName
    parent: BlockName | None
    group: int


class Removed(NamedTuple):
    """The blob (name, group) is gone."""

    name: BlockName
    group: int


class Cleared(NamedTuple):
    """Everything is gone."""


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What happened in one step, in order; `digests` are those after it."""

    incarnation: int
    number: int
    events: tuple[KvEvent, ...]
    digests: tuple[int, ...]  # of each group


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches that were asked for are not kept any more, or never were."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is stored after batch `number`; full-attention parents before their children."""

    incarnation: int
    number: int
    stored: tuple[Stored, ...]
    digests: tuple[int, ...]


def name_digest(name: BlockName) -> int:
    """A group's digest is the sum of these modulo DIGEST_MODULUS, in whatever order."""
    return int.from_bytes(name[:8], "little")


class EventLog:
    """Collects the events of a step and keeps the last batches; delivers nothing itself.

    A publisher keeps its own cursor and reads `since(cursor)`: a batch may be closed by a
    snapshot as well as by the step.
    """

    def __init__(self, num_groups: int, incarnation: int, max_events: int) -> None:
        self.incarnation = incarnation
        self.latest = 0  # number of the last batch
        self._max_events = max_events
        self._num_kept = 0
        self._pending: list[KvEvent] = []
        self._batches: deque[EventBatch] = deque()
        self._digests = [0] * num_groups

    @property
    def digests(self) -> tuple[int, ...]:
        return tuple(self._digests)

    def stored(self, name: BlockName, parent: BlockName | None, group: int) -> None:
        self._pending.append(Stored(name, parent, group))
        self._digests[group] = (self._digests[group] + name_digest(name)) % DIGEST_MODULUS

    def removed(self, name: BlockName, group: int) -> None:
        self._pending.append(Removed(name, group))
        self._digests[group] = (self._digests[group] - name_digest(name)) % DIGEST_MODULUS

    def cleared(self) -> None:
        """Whatever the step did before does not matter any more."""
        self._pending = [Cleared()]
        self._digests = [0] * len(self._digests)

    def flush(self) -> int:
        """Closes the step's batch, if anything happened; the number of the latest batch."""
        if self._pending:
            self.latest += 1
            events = tuple(self._pending)
            self._pending.clear()
            batch = EventBatch(self.incarnation, self.latest, events, self.digests)
            self._batches.append(batch)
            self._num_kept += len(events)
            while self._num_kept > self._max_events:
                self._num_kept -= len(self._batches.popleft().events)
        return self.latest

    def since(self, number: int) -> list[EventBatch] | Gap:
        """The closed batches after batch `number`, or word that a snapshot is needed."""
        oldest = self.latest - len(self._batches) + 1
        if not oldest - 1 <= number <= self.latest:
            return Gap()
        latest_first = islice(reversed(self._batches), self.latest - number)
        return list(latest_first)[::-1]  # from the oldest on it took 0.3 ms for one of 65,000

    def snapshot(self, stored: Iterable[Stored]) -> Snapshot:
        """`stored` is everything the cache has now; closes the step's batch."""
        return Snapshot(self.incarnation, self.flush(), tuple(stored), self.digests)
