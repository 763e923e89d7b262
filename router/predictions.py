"""Blocks that a worker does not hold yet, and will soon: prompts were sent there. Pure.

A block's key stands for all blocks before it, too. So what is predicted is a tree, of as many keys
as were predicted but of few runs: one for each prompt, and one more wherever two part.
"""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from router.depth import closed_depth


class _Run:
    """Keys one after the other, until a time, and how they go on. What branches off never ends
    later. Always has keys left: those before `start` are confirmed."""

    __slots__ = ("branches", "keys", "start", "until")

    def __init__(self, keys: "array[int]", until: float) -> None:
        self.keys = keys  # numbers, which the garbage collector does not look at
        self.start = 0
        self.until = until
        self.branches: dict[int, _Run] = {}  # by their first keys

    def __len__(self) -> int:
        return len(self.keys) - self.start

    def num_common(self, keys: Sequence[int], start: int) -> int:
        """How long both go alike: wherever they are alike, they are alike before."""
        own, skip = self.keys, self.start
        most = min(len(own) - skip, len(keys) - start)
        return bisect_left(range(most), True, key=lambda i: own[skip + i] != keys[start + i])

    def cut(self, num: int) -> None:
        """Everything after so many keys becomes a branch."""
        if num < len(self):
            end = self.start + num
            rest = _Run(self.keys[end:], self.until)
            rest.branches = self.branches
            self.keys = self.keys[:end]
            self.branches = {rest.keys[0]: rest}


class Predictions:
    """Each holds until its time, or until it is confirmed; a later one prolongs it.

    Bounded by `limit` keys, counted once for each time that they were predicted: those that
    would end first go first.
    """

    def __init__(self) -> None:
        self.soonest = inf  # when something ends; nothing is to be purged before
        self.next: dict[int, _Run] = {}  # by the key that is to be stored next
        self._ends: list[tuple[float, int]] = []  # a heap: when how many keys end
        self._num_kept = 0

    def __len__(self) -> int:
        return sum(map(len, _every(self.next.values())))

    def depth(self, keys: Sequence[int], low: int) -> int:
        """How many leading keys are there or predicted, where the first `low` are there."""
        runs = self.next
        while low < len(keys) and (run := runs.get(keys[low])):
            num_common = run.num_common(keys, low)
            low += num_common
            if num_common < len(run):
                break
            runs = run.branches
        return low

    def add(self, keys: Sequence[int], until: float, limit: int) -> None:
        """`keys`: what goes on from what is there."""
        run = _Run(array("Q", keys[:limit]), until)
        if not run.keys:
            return
        if self._num_kept + len(run) > limit:
            self._make_room(limit - len(run))
        heappush(self._ends, (until, len(run)))
        self.soonest = self._ends[0][0]
        self._num_kept += len(run)
        _graft(self.next, [run])

    def confirm(self, keys: Sequence[int]) -> None:
        """In the order in which they were stored: most often one prompt's, one after the other."""
        at, num_keys = 0, len(keys) if self.next else 0
        while at < num_keys:
            run = self.next.pop(keys[at], None)
            at += 1
            if run is not None:
                first, start, end = at, run.start + 1, len(run.keys)
                while at < num_keys and start < end and run.keys[start] == keys[at]:
                    start += 1
                    at += 1
                run.start = start
                _graft(self.next, [run] if start < end else run.branches.values())
                # What was evicted and predicted once more is there twice.
                if not self.next.keys().isdisjoint(keys[first:at]):
                    at = next(i for i in range(first, at) if keys[i] in self.next)

    def confirm_held(self, held: Container[int]) -> None:
        todo, self.next = list(self.next.values()), {}
        while todo:
            run = todo.pop()
            run.start += closed_depth(run.keys[run.start :], held)
            if len(run):
                _graft(self.next, [run])
            else:
                todo += run.branches.values()

    def purge(self, now: float) -> None:
        """Costs as much as there are prompts."""
        while self.soonest <= now:
            self._drop_first()
        _prune(self.next, now)

    def clear(self) -> None:
        self.next.clear()
        self._ends.clear()
        self._num_kept = 0
        self.soonest = inf

    def _make_room(self, most: int) -> None:
        until = -inf
        while self._num_kept > most:
            until = self._drop_first()
        _prune(self.next, until)

    def _drop_first(self) -> float:
        until, num_keys = heappop(self._ends)
        self._num_kept -= num_keys
        self.soonest = self._ends[0][0] if self._ends else inf
        return until


def _every(runs: Iterable[_Run]) -> Iterator[_Run]:
    """With all that branches off."""
    todo = list(runs)
    while todo:
        run = todo.pop()
        todo += run.branches.values()
        yield run


def _graft(runs: dict[int, _Run], others: Collection[_Run]) -> None:
    """What both have ends with the later one."""
    todo = [(runs, other) for other in others]
    while todo:
        runs, run = todo.pop()
        there = runs.setdefault(run.keys[run.start], run)
        if there is run:
            continue
        num_common = there.num_common(run.keys, run.start)
        if num_common == len(there) and not there.branches and there.until <= run.until:
            runs[run.keys[run.start]] = run
            continue
        there.cut(num_common)
        run.cut(num_common)
        there.until = max(there.until, run.until)
        todo += [(there.branches, branch) for branch in run.branches.values()]


def _prune(runs: dict[int, _Run], now: float) -> None:
    todo = [runs]
    while todo:
        runs = todo.pop()
        for key in [key for key, run in runs.items() if run.until <= now]:
            del runs[key]
        todo += [run.branches for run in runs.values() if run.branches]
