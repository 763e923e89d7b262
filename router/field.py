"""The workers that a request may go to now. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from router.ask import Ask, Source
from router.ledger import Account, Ledger
from router.prefix_index import PrefixIndex
from router.worker_index import Match
from router.workers import Leg, Worker

# Silence is a matter of seconds.
_FRESH_S = 0.02


class Group(NamedTuple):
    """Those of one fingerprint: they share blocks."""

    prefill: Sequence[Account]
    decode: Sequence[Account]
    workers: Sequence[Worker]  # prefill, then decode
    shortest: float  # of what their prefill workers take, in tokens

    @classmethod
    def of(cls, prefill: Iterable[Account], decode: Iterable[Account]) -> "Group":
        legs = list(prefill), list(decode)
        workers = [account.worker for leg in legs for account in leg]
        shortest = min((account.max_model_len for account in legs[0]), default=float("inf"))
        return cls(*legs, workers, shortest)

    def without(self, workers: frozenset[Worker]) -> "Group":
        if workers.isdisjoint(self.workers):
            return self
        return Group.of(
            (account for account in self.prefill if account.worker not in workers),
            (account for account in self.decode if account.worker not in workers),
        )

    def for_prompt(self, num_tokens: int) -> "Group":
        """Without the prefill workers that would refuse it: while workers are replaced by others
        that take longer ones, there are both."""
        if num_tokens < self.shortest:
            return self
        takers = (account for account in self.prefill if num_tokens < account.max_model_len)
        return Group.of(takers, self.decode)


class Field(NamedTuple):
    """A group as one prompt finds it: how many of its tokens each worker holds or is about to
    hold, and who holds the most. The last token is always computed."""

    group: Group
    prefill_cached: Sequence[int]
    decode_cached: Sequence[int]
    source: Source | None
    now: float

    @classmethod
    def of(
        cls, group: Group, matches: Sequence[Match], block_size: int, ask: Ask, now: float
    ) -> "Field":
        most = ask.num_tokens - 1
        num_prefill = len(group.prefill)
        if not matches:
            return cls(group, [0] * num_prefill, [0] * len(group.decode), None, now)
        cached = [min(most, match[0] * block_size) for match in matches]
        source = _source(group, matches, block_size, most)
        return cls(group, cached[:num_prefill], cached[num_prefill:], source, now)


class Fields:
    def __init__(self, ledger: Ledger, index: PrefixIndex, may_stay: bool = True) -> None:
        """`may_stay`: a decode worker may compute a prompt."""
        self._ledger = ledger
        self._may_stay = may_stay
        self._index = index
        self._groups: list[Group] | None = None
        self._until = 0.0

    def changed(self) -> None:
        """Somebody may take something new, or may not any more."""
        self._groups = None

    def groups(self, now: float) -> list[Group]:
        """Those with a decode worker."""
        if self._groups is None or now >= self._until:
            self._groups = list(self._group(now))
            self._until = now + _FRESH_S
        return self._groups

    def of(self, ask: Ask, block_size: int, now: float) -> Iterator[Field]:
        for group in self.groups(now):
            left = group.without(ask.without) if ask.without else group
            may_stay = self._may_stay and ask.may_stay
            takers = left.for_prompt(ask.num_tokens)
            if takers.prefill or may_stay:  # or else a worker says why it refuses
                left = takers
            if left.decode and (left.prefill or may_stay):
                matches = self._index.matches(left.workers, ask.keys, now) if ask.keys else []
                yield Field.of(left, matches, block_size, ask, now)

    def _group(self, now: float) -> Iterator[Group]:
        usable: dict[str, tuple[list[Account], list[Account]]] = {}
        for leg in Leg:
            for account in self._ledger.accounts[leg].values():
                if account.takes_new(now):
                    legs = usable.setdefault(account.worker.fingerprint, ([], []))
                    legs[leg is Leg.DECODE].append(account)
        for prefill, decode in usable.values():
            if decode:
                yield Group.of(prefill, decode)


def _source(group: Group, matches: Sequence[Match], block_size: int, most: int) -> Source | None:
    """Who can hand out the most of it: what is predicted is not there yet."""
    num_held = max(match.num_held for match in matches)
    if not num_held:
        return None
    best = next(at for at, match in enumerate(matches) if match.num_held == num_held)
    return Source(group.workers[best], min(most, num_held * block_size))
