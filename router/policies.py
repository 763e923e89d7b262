"""The policies by name. The others are there to be compared with ours.

Each chooses both legs in its own way, and has every prompt computed by a prefill worker where
there is one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from router.ask import Ask
from router.field import Field
from router.pairing import NUM_CONSIDERED, Cheapest, Choice, Reason, choice_of
from router.ways import Computing, Decoding, Ways, Weights

STICKY_SHARE = 0.8  # of a prompt, cached: its worker is warm
STICKY_S = 3.0  # by which a warm worker may be behind the others


class Policy(Protocol):
    """`rebinds`: a request may wait at the router for the worker that was chosen, and is chosen
    for again meanwhile. With any other policy it goes at once, and waits there."""

    @property
    def rebinds(self) -> bool: ...

    def choose(self, ask: Ask, field: Field, weights: Weights) -> Choice:
        """In a field with a decode worker. It may be asked for a request more than once."""
        ...

    def note_placed(self) -> None:
        """A request went where it was chosen to go."""
        ...


class _EachLeg(ABC):
    """A policy that looks at one leg at a time. The fit of a decode worker is no concern of it."""

    rebinds: ClassVar[bool] = False

    def choose(self, ask: Ask, field: Field, weights: Weights) -> Choice:
        ways = Ways(ask, field, weights, may_fetch=False)
        decoding = self.decoding(list(ways.decoding()), ask)
        computing = self.computing(list(ways.computing()), ask)[:NUM_CONSIDERED]
        every = [ways.remote(one, decoding) for one in computing] or [ways.local(decoding)]
        reason = Reason.POLICY if computing else Reason.NO_PREFILL_WORKER
        return choice_of(every[0], every, computing, reason)

    def note_placed(self) -> None:  # noqa: B027 - most go by nothing that was
        pass

    @abstractmethod
    def decoding(self, every: Sequence[Decoding], ask: Ask) -> Decoding: ...

    @abstractmethod
    def computing(self, every: Sequence[Computing], ask: Ask) -> list[Computing]:
        """The best first."""


class RoundRobin(_EachLeg):
    def __init__(self) -> None:
        self._num_placed = 0

    def note_placed(self) -> None:
        self._num_placed += 1

    def decoding(self, every: Sequence[Decoding], ask: Ask) -> Decoding:
        return every[self._num_placed % len(every)]

    def computing(self, every: Sequence[Computing], ask: Ask) -> list[Computing]:
        if not every:
            return []
        first = self._num_placed % len(every)
        return [*every[first:], *every[:first]]


class Random(_EachLeg):
    def decoding(self, every: Sequence[Decoding], ask: Ask) -> Decoding:
        return min(every, key=lambda one: one.draw)

    def computing(self, every: Sequence[Computing], ask: Ask) -> list[Computing]:
        return sorted(every, key=lambda one: one.draw)


class LeastLoaded(_EachLeg):
    """The fewest sequences, the least that is queued."""

    def decoding(self, every: Sequence[Decoding], ask: Ask) -> Decoding:
        return min(every, key=_num_sequences)

    def computing(self, every: Sequence[Computing], ask: Ask) -> list[Computing]:
        return sorted(every, key=lambda one: (one.wait_s, one.draw))


class MaxHit(_EachLeg):
    """Who holds the most of the prompt, whatever is queued there."""

    def decoding(self, every: Sequence[Decoding], ask: Ask) -> Decoding:
        return min(every, key=lambda one: (-one.num_cached, *_num_sequences(one)))

    def computing(self, every: Sequence[Computing], ask: Ask) -> list[Computing]:
        return sorted(every, key=lambda one: (-one.num_cached, one.wait_s, one.draw))


class Sticky(LeastLoaded):
    """Whoever holds nearly all of the prompt, unless it is far behind; or else who is done with
    it first."""

    def computing(self, every: Sequence[Computing], ask: Ask) -> list[Computing]:
        least_s = min((one.wait_s for one in every), default=0.0)
        enough = STICKY_SHARE * (ask.num_tokens - 1)
        return sorted(every, key=lambda one: (not _is_warm(one, enough, least_s), _done_s(one)))


def _is_warm(one: Computing, enough: float, least_s: float) -> bool:
    return one.num_cached >= enough and one.wait_s - least_s <= STICKY_S


def _num_sequences(one: Decoding) -> tuple[float, float]:
    return one.account.seats.num_sequences, one.draw


def _done_s(one: Computing) -> tuple[float, float]:
    return one.wait_s + one.prefill_s, one.draw


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "cost": Cheapest,
    "round-robin": RoundRobin,
    "random": Random,
    "least-loaded": LeastLoaded,
    "max-hit": MaxHit,
    "sticky": Sticky,
}
