"""The workers with the least before them, best first. Pure.

A load report is late by up to its period, and what we gave since is not in it: the larger of
what the worker says and what we gave counts, since the one is about to become the other.
"""

from collections.abc import Iterable

from router.workers import Standing


def for_decode(standings: Iterable[Standing], now: float) -> list[Standing]:
    return sorted(_usable(standings, now), key=_num_sequences)


def for_prefill(standings: Iterable[Standing], fingerprint: str, now: float) -> list[Standing]:
    """Those whose blocks a decode worker of the fingerprint can use."""
    fitting = (one for one in standings if one.worker.fingerprint == fingerprint)
    return sorted(_usable(fitting, now), key=_num_tokens)


def _usable(standings: Iterable[Standing], now: float) -> Iterable[Standing]:
    return (one for one in standings if one.takes_new(now))


def _num_sequences(one: Standing) -> int:
    return max(one.num_given, one.load.num_sequences if one.load else 0)


def _num_tokens(one: Standing) -> int:
    return max(one.num_given_tokens, one.load.num_queued_tokens if one.load else 0)
