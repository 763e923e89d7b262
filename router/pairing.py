"""Our policy: of the ways to serve a prompt, the one in which everybody waits the least. Pure.

A pair's cost is a sum of what one worker decides, what the other one decides, and the link
between them. So only the best few of each leg are joined.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import product
from typing import NamedTuple

from router.ask import Ask, Placement
from router.field import Field
from router.ways import Computing, Decoding, Way, Ways, Weights
from router.workers import Worker

NUM_JOINED = 4  # of each leg
NUM_CONSIDERED = 4  # ways that a placement tells of
# Costs that no measurement tells apart.
TIE = 0.01


class Reason(StrEnum):
    """Why a request goes where it goes."""

    REMOTE = "remote"  # a prefill worker and the hand-off are sooner
    LOCAL_SOONER = "local-sooner"
    NO_PREFILL_WORKER = "no-prefill-worker"
    POLICY = "policy"  # which does not ask where it is sooner


class Choice(NamedTuple):
    """A placement, and the way that it is charged as."""

    way: Way
    placement: Placement

    def takes_new(self, now: float) -> bool:
        """Whether both of its workers do."""
        return self.way.computing.takes_new(now) and self.way.decode.takes_new(now)


class Cheapest:
    """The way of the least cost."""

    rebinds = True

    def choose(self, ask: Ask, field: Field, weights: Weights) -> Choice:
        ways = Ways(ask, field, weights)
        decoding = list(ways.decoding())
        computing = sorted(ways.computing())[:NUM_JOINED]
        pairs = product(computing, sorted(decoding)[:NUM_JOINED])
        every = [ways.remote(*pair) for pair in pairs]
        if weights.may_stay:
            spared = {way.decode for way in every if way.spares_pause}
            staying = [one for one in decoding if one.account not in spared]
            every += _local(ways, staying, min(every, key=_order, default=None))
        best = sorted(every, key=_order)[:NUM_CONSIDERED]
        first = _of_equals(best, weights)
        if first.terms.prefill is not None:
            reason = Reason.REMOTE
        else:
            reason = Reason.LOCAL_SOONER if computing else Reason.NO_PREFILL_WORKER
        return choice_of(first, best, computing, reason)

    def note_placed(self) -> None:
        pass


def _local(ways: Ways, decoding: Iterable[Decoding], pair: Way | None) -> Iterator[Way]:
    """Those that may be the best, and the one to compare the best pair with."""
    for one in decoding:
        if (
            pair is None
            or one.account is pair.decode
            or ways.local_at_least_s(one) <= pair.terms.cost_s * (1 + TIE)
        ):
            yield ways.local(one)


def choice_of(
    way: Way, others: Sequence[Way], computing: Sequence[Computing], reason: Reason
) -> Choice:
    """`others`: that were considered. `computing`: whom else it may be asked of, in order."""
    considered = (way.terms, *(other.terms for other in others if other is not way))
    prefill: tuple[Worker, ...] = ()
    if way.terms.prefill is not None:
        named = (way.terms.prefill, *(one.account.worker for one in computing))
        prefill = tuple(dict.fromkeys(named))
    sources = () if way.terms.source is None else (way.terms.source,)
    worker = way.decode.worker
    return Choice(way, Placement(worker, prefill, sources, reason.value, considered))


def _order(way: Way) -> tuple[int, float]:
    return way.fit, way.terms.cost_s


def _of_equals(best: Sequence[Way], weights: Weights) -> Way:
    """Of those that cost about the same. Who would wait though there is one that is free would be
    overtaken by its equals that draw that one."""
    first = best[0]
    most_s = first.terms.cost_s * (1 + TIE)
    equals = [way for way in best if way.fit == first.fit and way.terms.cost_s <= most_s]
    drawn = _drawn(equals, weights)
    if len(equals) <= 2 or weights.goes(drawn):
        return drawn
    free = [way for way in equals if weights.goes(way)]
    return _drawn(free, weights) if free else drawn


def _drawn(equals: Sequence[Way], weights: Weights) -> Way:
    """Two are drawn, and the one with less before it is taken. Several routers that see the same
    then do not all go the same way."""
    if len(equals) > 2:
        kept = int(weights.draw() * len(equals))
        other = int(weights.draw() * (len(equals) - 1))
        equals = [equals[kept], equals[other + (other >= kept)]]
    return min(equals, key=lambda way: (_before(way), weights.draw()))


def _before(way: Way) -> tuple[float, float]:
    return way.terms.wait_s, way.decode.seats.num_context_tokens
