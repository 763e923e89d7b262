"""What waits at the router for more workers, by the pool that would need them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from router.ledger import Account
from router.waiting import Lack, Sums, Waiting

_KEPT = 0.98  # of what was learnt, with each guess


class Backlog(NamedTuple):
    """Nothing in it has been given to a worker, so none of it is in a worker's report.

    Seconds are of one worker's time for what is not cached of prompts. Uses are in workers: 2.3 is
    as much as two of the usual size and a third of another hold. Who waits for a worker that is
    gone, or where nobody takes anything, is not in it: more workers are no remedy for that.
    """

    num_prefill_prompts: float = 0.0  # that prefill workers are to compute
    prefill_s: float = 0.0
    num_decode_prompts: float = 0.0  # that decode workers are to compute themselves
    decode_s: float = 0.0
    num_sequences: float = 0.0  # for which decode workers have no room
    sequence_use: float = 0.0
    kv_use: float = 0.0

    @classmethod
    def of(
        cls, seen: Sequence[Waiting], sums: Sums, work_s: float, decode: Sequence[Account]
    ) -> Backlog:
        """`seen`: those of whom it is known what they wait for; all others are taken to be like
        them. `work_s`: of all prompts together."""
        if not seen:
            return cls()
        prompts_s = work_s / max(_seconds(seen), 1e-9)
        prompts = sums.num_requests / len(seen)
        by_prefill = [one for one in seen if one.lack is Lack.PREFILL_TIME]
        by_decode = [one for one in seen if one.lack is Lack.DECODE_TIME]
        for_room = [one for one in seen if one.lack is Lack.ROOM]
        num_sequences = sums.num_sequences * _share(_sequences(for_room), _sequences(seen))
        num_tokens = sums.num_tokens * _share(_uncached_tokens(for_room), _tokens(seen))
        return cls(
            len(by_prefill) * prompts,
            _seconds(by_prefill) * prompts_s,
            len(by_decode) * prompts,
            _seconds(by_decode) * prompts_s,
            num_sequences,
            _share(num_sequences, _mean(one.limits.max_sequences for one in decode)),
            _share(num_tokens, _mean(_total_tokens(one) for one in decode)),
        )


class Guesses:
    """How much longer prompts take than was guessed before anybody looked what is cached of them;
    each counts by its length."""

    def __init__(self) -> None:
        self._guessed_s = 0.0
        self._found_s = 0.0

    def note(self, guess_s: float, found_s: float) -> None:
        self._guessed_s = _KEPT * self._guessed_s + guess_s
        self._found_s = _KEPT * self._found_s + found_s

    @property
    def factor(self) -> float:
        return self._found_s / self._guessed_s if self._guessed_s else 1.0


def _seconds(waiting: Iterable[Waiting]) -> float:
    return sum(one.size_s for one in waiting)


def _sequences(waiting: Iterable[Waiting]) -> int:
    return sum(one.ask.num_choices for one in waiting)


def _tokens(waiting: Iterable[Waiting]) -> int:
    return sum(one.num_kv_tokens for one in waiting)


def _uncached_tokens(waiting: Iterable[Waiting]) -> int:
    """That would come to the decode worker which each would go to."""
    return sum(
        one.num_kv_tokens - (one.choice.way.num_decode_cached if one.choice else 0)
        for one in waiting
    )


def _total_tokens(account: Account) -> float:
    load = account.standing.load
    return load.num_total_tokens if load is not None else 0.0


def _mean(values: Iterable[float]) -> float:
    """Of what is known; 0: nothing is."""
    known = [value for value in values if 0 < value < float("inf")]
    return sum(known) / len(known) if known else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
