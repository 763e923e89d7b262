"""The requests that wait at the router, and whose turn it is. Pure.

The order: by priority; then by tenant, the one that was given the fewest tokens first; then, of one
tenant, the shortest for the answers that it gives, and those of nearly one length as they came. A
share of the computing is for whoever has waited too long, in order of arrival: all of it would make
everybody late once more comes than can be computed. Looking at the first few costs the same whether
ten or ten thousand wait.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import count
from math import log2
from typing import TypeVar

from router.ask import Ask
from router.pairing import Choice
from router.tenants import Tenants

# Of the computing, for those who have waited too long, while there are any.
OVERDUE_SHARE = 0.1

# Lengths within a fifth of each other are one: or else whoever is a little shorter would overtake
# for ever where more comes than can be computed.
_LENGTHS_OF_DOUBLE = 4
_NUM_LENGTHS = 96  # of 16 M tokens


Key = TypeVar("Key", int, float)


class Lack(Enum):
    """What keeps a request waiting, of the workers that it would go to."""

    PREFILL_TIME = auto()  # enough prompts wait at the prefill worker
    DECODE_TIME = auto()  # the same, where a decode worker would compute it
    ROOM = auto()  # at the decode worker, for its answers


@dataclass(slots=True, eq=False)
class Waiting:
    """`num_uncached` of its tokens have to be computed, which takes `size_s`, as far as is known; a
    guess before it is first looked at. What a worker's steps take changes from moment to moment, so
    it is by tokens that one is shorter than another. `choice`: where it would have gone when it was
    looked at last, and `lack`: why it did not. `due`: by how much of its size its turn changes what
    the overdue ones are owed."""

    ask: Ask
    number: int
    arrived: float
    deadline: float
    size_s: float
    num_uncached: int
    choice: Choice | None = None
    looked_at: float = float("-inf")
    look_number: int = -1  # what the router knew then
    due: float = 0.0
    is_guess: bool = True
    lack: Lack | None = None
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.resize(self.size_s, self.num_uncached)

    def resize(self, size_s: float, num_uncached: int) -> None:
        self.size_s, self.num_uncached = size_s, num_uncached
        # Who was moved here may have a part of its answer, and goes first.
        self.rank = 0 if self.ask.moved else _length(self.ask, num_uncached)

    @property
    def num_tokens(self) -> int:
        """That it takes of the cluster."""
        return self.num_uncached + self.ask.num_choices * self.ask.num_new

    @property
    def num_kv_tokens(self) -> int:
        """Of cache, halfway through its answers."""
        return self.ask.num_tokens + self.ask.num_choices * self.ask.num_new // 2


@dataclass(slots=True)
class Sums:
    """Of all that wait."""

    num_requests: int = 0
    num_sequences: int = 0
    num_tokens: int = 0  # of cache
    guessed_s: float = 0.0  # of computing, by nothing but the lengths of prompts

    def count(self, waiting: Waiting, sign: int) -> None:
        self.num_requests += sign
        self.num_sequences += sign * waiting.ask.num_choices
        self.num_tokens += sign * waiting.num_kv_tokens
        if waiting.is_guess:
            self.guessed_s += sign * waiting.size_s
        if not self.num_requests:  # floats that were added and taken away again leave a rest
            self.guessed_s = 0.0


class WaitingRoom:
    def __init__(self, overdue_s: float) -> None:
        self.sums = Sums()
        self._overdue_s = overdue_s
        self._by_id: dict[str, Waiting] = {}
        self._levels: dict[int, _Level] = {}  # by priority
        self._tenants = Tenants()
        # By id: who is gone stays in it for a while, and must not keep a long prompt's keys alive.
        self._deadlines: list[tuple[float, int, str]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, waiting: Waiting) -> bool:
        return self._by_id.get(waiting.ask.request_id) is waiting

    @property
    def work_s(self) -> float:
        """Of computing, as far as it is known."""
        return sum(level.work_s for level in self._levels.values())

    def add(self, ask: Ask, deadline: float, size_s: float, now: float) -> Waiting:
        assert ask.request_id not in self._by_id, ask.request_id
        arrived = ask.arrived if 0 < ask.arrived <= now else now
        waiting = Waiting(ask, next(self._numbers), arrived, deadline, size_s, ask.num_tokens)
        self._by_id[ask.request_id] = waiting
        self.sums.count(waiting, 1)
        level = self._levels.setdefault(ask.priority, _Level())
        if ask.tenant not in level.lanes:
            level.lanes[ask.tenant] = _Lane()
            self._tenants.enter(ask.priority, ask.tenant)
        level.lanes[ask.tenant].add(waiting)
        level.work_s += size_s
        level.num_waiting += 1
        heappush(self._deadlines, (deadline, waiting.number, ask.request_id))
        return waiting

    def remove(self, request_id: str) -> Waiting | None:
        waiting = self._by_id.pop(request_id, None)
        if waiting is not None:
            ask = waiting.ask
            self.sums.count(waiting, -1)
            level = self._levels[ask.priority]
            level.lanes[ask.tenant].remove(waiting)
            level.work_s -= waiting.size_s
            level.num_waiting -= 1
            if not level.lanes[ask.tenant]:
                del level.lanes[ask.tenant]
                self._tenants.leave(ask.priority, ask.tenant)
            if not level.lanes:
                del self._levels[ask.priority]
            self._compact()
        return waiting

    def give(self, request_id: str) -> None:
        """It is its turn; its tenant pays for it."""
        waiting = self._by_id[request_id]
        ask = waiting.ask
        self._tenants.charge(ask.tenant, waiting.num_tokens)
        self._levels[ask.priority].lanes[ask.tenant].owed_s += waiting.due * waiting.size_s
        self.remove(request_id)

    def resize(self, waiting: Waiting, size_s: float, num_uncached: int) -> None:
        """Somebody has looked at it."""
        if waiting.is_guess:
            self.sums.guessed_s -= waiting.size_s
            waiting.is_guess = False
        if (size_s, num_uncached) != (waiting.size_s, waiting.num_uncached):
            level = self._levels[waiting.ask.priority]
            level.work_s += size_s - waiting.size_s
            level.lanes[waiting.ask.tenant].resize(waiting, size_s, num_uncached)

    def expired(self, now: float) -> list[Ask]:
        """Those past their deadline; they wait no more."""
        asks = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, request_id = heappop(self._deadlines)
            waiting = self._by_id.get(request_id)
            if waiting is not None and waiting.number == number:
                self.remove(request_id)
                asks.append(waiting.ask)
        return asks

    def in_order(self, now: float) -> Iterator[Waiting]:
        """Valid until something is added or taken."""
        before = now - self._overdue_s
        for priority in sorted(self._levels):
            lanes = self._levels[priority].lanes
            turns = {}
            for turn in self._tenants.turns(priority):
                if turn.tenant not in turns:
                    turns[turn.tenant] = lanes[turn.tenant].in_order(before)
                waiting = next(turns[turn.tenant], None)
                turn.num_tokens = None if waiting is None else waiting.num_tokens
                if waiting is not None:
                    yield waiting

    def is_overdue(self, waiting: Waiting, now: float) -> bool:
        return waiting.arrived <= now - self._overdue_s

    def seconds_before(self, ask: Ask, num_uncached: int, num_servers: int) -> float:
        """Until its turn, when so many workers compute what goes before it. What comes later
        and is shorter is not foreseen; if it would be overdue by then, all that is here now
        goes before it."""
        rank = _length(ask, num_uncached)
        levels = self._levels.items()
        sooner_s = sum(level.work_s for priority, level in levels if priority < ask.priority)
        level = self._levels.get(ask.priority)
        if level is None:
            return sooner_s / num_servers
        wait_s = (sooner_s + level.shorter_s(ask.tenant, rank)) / num_servers
        if wait_s > self._overdue_s:
            wait_s = (sooner_s + level.shorter_s(ask.tenant, _NUM_LENGTHS)) / num_servers
        return wait_s

    def num_before(self, ask: Ask) -> int:
        """How many would be given their turns first, if nobody came later."""
        levels = self._levels.items()
        num = sum(level.num_waiting for priority, level in levels if priority < ask.priority)
        level = self._levels.get(ask.priority)
        return num if level is None else num + level.num_before(ask.tenant)

    def _compact(self) -> None:
        """Keeps the heap from growing with those that are gone long before their deadline."""
        if len(self._deadlines) > 2 * len(self._by_id) + 64:
            left = self._by_id.items()
            self._deadlines = [(one.deadline, one.number, name) for name, one in left]
            heapify(self._deadlines)


@dataclass(slots=True)
class _Lane:
    """Of one tenant, at one priority."""

    by_rank: list[tuple[int, int, Waiting]] = field(default_factory=list)
    by_arrival: list[tuple[float, int, Waiting]] = field(default_factory=list)
    work_of_rank_s: list[float] = field(default_factory=lambda: [0.0] * _NUM_LENGTHS)
    work_s: float = 0.0
    owed_s: float = 0.0  # to the overdue ones

    def __len__(self) -> int:
        return len(self.by_rank)

    def add(self, waiting: Waiting) -> None:
        insort(self.by_rank, (waiting.rank, waiting.number, waiting))
        insort(self.by_arrival, (waiting.arrived, waiting.number, waiting))
        self._count(waiting, waiting.size_s)

    def remove(self, waiting: Waiting) -> None:
        _remove(self.by_rank, waiting.rank, waiting.number)
        _remove(self.by_arrival, waiting.arrived, waiting.number)
        self._count(waiting, -waiting.size_s)

    def resize(self, waiting: Waiting, size_s: float, num_uncached: int) -> None:
        _remove(self.by_rank, waiting.rank, waiting.number)
        self._count(waiting, -waiting.size_s)
        waiting.resize(size_s, num_uncached)
        insort(self.by_rank, (waiting.rank, waiting.number, waiting))
        self._count(waiting, size_s)

    def in_order(self, before: float) -> Iterator[Waiting]:
        """As if each went in its turn; who arrived before the given time is overdue."""
        num_overdue = bisect_left(self.by_arrival, (before,))
        oldest = (self.by_arrival[i][2] for i in range(num_overdue))
        shortest = (one[2] for one in self.by_rank)
        owed_s, seen = self.owed_s, set[int]()
        while len(seen) < len(self.by_rank):
            by_age = _unseen(oldest, seen) if owed_s >= 0 else None
            waiting = by_age or _unseen(shortest, seen)
            assert waiting is not None, "the shortest are all there are"
            seen.add(waiting.number)
            waiting.due = OVERDUE_SHARE - (by_age is not None) if num_overdue else 0.0
            owed_s += waiting.due * waiting.size_s
            yield waiting

    def shorter_s(self, rank: int) -> float:
        """With those of the same length."""
        return sum(self.work_of_rank_s[: rank + 1])

    def _count(self, waiting: Waiting, seconds: float) -> None:
        self.work_of_rank_s[waiting.rank] += seconds
        self.work_s += seconds


@dataclass(slots=True)
class _Level:
    """Of one priority."""

    lanes: dict[str, _Lane] = field(default_factory=dict)  # by tenant
    work_s: float = 0.0
    num_waiting: int = 0

    def num_before(self, tenant: str) -> int:
        """All of its own, and of all other tenants no more than a turn each for every one."""
        num_own = len(self.lanes.get(tenant, ()))
        return num_own + min(self.num_waiting - num_own, num_own * (len(self.lanes) - 1))

    def shorter_s(self, tenant: str, rank: int) -> float:
        """Of all other tenants no more than a turn each for every one of its own."""
        own = self.lanes.get(tenant)
        if own is None:
            return 0.0
        own_s = own.shorter_s(rank)
        return own_s + min(self.work_s - own.work_s, own_s * (len(self.lanes) - 1))


def _unseen(waiting: Iterator[Waiting], seen: Container[int]) -> Waiting | None:
    return next((one for one in waiting if one.number not in seen), None)


def _remove(entries: list[tuple[Key, int, Waiting]], key: Key, number: int) -> None:
    at = bisect_left(entries, (key, number))
    assert entries[at][1] == number
    del entries[at]


def _length(ask: Ask, num_uncached: int) -> int:
    """A prompt with many choices serves many answers."""
    of_each = max(1.0, num_uncached / max(1, ask.num_choices))
    return min(_NUM_LENGTHS - 1, 1 + int(_LENGTHS_OF_DOUBLE * log2(of_each)))
