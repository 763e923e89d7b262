"""Whose turn it is among those who share a cluster: who was given the fewest tokens. Pure."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace


@dataclass(slots=True)
class Turn:
    """A tenant's; whoever takes it says how many tokens went, None if nothing is left."""

    tenant: str
    num_tokens: float | None = None


class Tenants:
    """A counter each, of the tokens that it was given. Who comes, or comes back, begins at the
    lowest counter of those who wait, or else at that of the one who was served last: there is no
    credit for having been away, and where nobody waits nobody is owed anything."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._waiting: dict[int, list[tuple[float, str]]] = {}  # by priority, lowest first
        self._priorities: dict[str, set[int]] = {}  # in which a tenant waits
        self._last = 0.0  # counter of the one that was served last

    def __len__(self) -> int:
        """Those that are remembered."""
        return len(self._counters)

    def enter(self, priority: int, tenant: str) -> None:
        if tenant not in self._priorities:
            floor = self._floor()
            self._counters[tenant] = max(self._counters.get(tenant, floor), floor)
            self._priorities[tenant] = set()
        self._priorities[tenant].add(priority)
        insort(self._waiting.setdefault(priority, []), (self._counters[tenant], tenant))

    def leave(self, priority: int, tenant: str) -> None:
        self._take_out(priority, tenant)
        if not self._waiting[priority]:
            del self._waiting[priority]
        self._priorities[tenant].discard(priority)
        if not self._priorities[tenant]:
            del self._priorities[tenant]
            self._prune()

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Of one that waits."""
        for priority in self._priorities[tenant]:
            self._take_out(priority, tenant)
        self._counters[tenant] += num_tokens
        self._last = self._counters[tenant]
        for priority in self._priorities[tenant]:
            insort(self._waiting[priority], (self._counters[tenant], tenant))

    def turns(self, priority: int) -> Iterator[Turn]:
        """One after the other, as if each were charged for what its turns took. Valid until
        somebody enters, leaves, or is charged."""
        waiting = self._waiting.get(priority, [])
        again: list[tuple[float, str]] = []
        at = 0
        while at < len(waiting) or again:
            is_new = at < len(waiting) and (not again or waiting[at] <= again[0])
            counter, tenant = waiting[at] if is_new else again[0]
            at += is_new
            turn = Turn(tenant)
            yield turn
            if turn.num_tokens is None:
                if not is_new:
                    heappop(again)
            elif is_new:
                heappush(again, (counter + turn.num_tokens, tenant))
            else:
                heapreplace(again, (counter + turn.num_tokens, tenant))

    def _floor(self) -> float:
        lowest = [waiting[0][0] for waiting in self._waiting.values()]
        return min(lowest) if lowest else self._last

    def _take_out(self, priority: int, tenant: str) -> None:
        waiting = self._waiting[priority]
        del waiting[bisect_left(waiting, (self._counters[tenant], tenant))]

    def _prune(self) -> None:
        """Who is away with no more than the floor loses nothing by being forgotten."""
        if len(self._counters) > 2 * len(self._priorities) + 1024:
            floor = self._floor()
            self._counters = {
                tenant: counter
                for tenant, counter in self._counters.items()
                if tenant in self._priorities or counter > floor
            }
