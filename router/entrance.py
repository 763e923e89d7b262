"""Whether a request that comes may wait, and what is known of it by then. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from router.admission import MIN_RETRY_S, Refusal, Refused
from router.ask import Ask
from router.choosing import Chooser
from router.config import RouterConfig
from router.foresight import Foresight
from router.ledger import Ledger
from router.pairing import Choice
from router.waiting import Lack, Waiting, WaitingRoom
from router.ways import Way
from router.workers import Leg


class Admitted(NamedTuple):
    """How long its prompt is computed, as far as that is known; where, and when its first token
    would come, where that was asked."""

    size_s: float
    choice: Choice | None = None
    predicted_s: float | None = None


class Entrance:
    """Looks at what waits, and changes none of it. Without a foresight nobody is late."""

    def __init__(
        self,
        config: RouterConfig,
        ledger: Ledger,
        room: WaitingRoom,
        chooser: Chooser,
        foresight: Foresight | None,
    ) -> None:
        self.config = config
        self.foresight = foresight
        self._ledger = ledger
        self._room = room
        self._chooser = chooser

    def look_at(self, ask: Ask, now: float, held: Sequence[Waiting]) -> Admitted:
        """Refused is raised for whom there is no room, or who would be late. `held`: by the last
        dispatch that looked."""
        if not ask.moved and len(self._room) >= self.config.max_waiting:
            raise Refused(Refusal.FULL, max(MIN_RETRY_S, self._drained_s(held, now)))
        foresight = None if ask.moved else self.foresight
        choice = self._chooser.choose(ask, now) if foresight is not None else None
        if foresight is None or choice is None:
            token_s = self._ledger.measured.mean(Leg.PREFILL).prompt_token_s
            return Admitted(token_s * ask.num_tokens)
        terms = choice.way.terms
        num_uncached = ask.num_tokens - terms.num_cached
        before_s = self._room.seconds_before(ask, num_uncached, self._num_servers(now))
        first_s, place_s = self._places_s(choice.way, ask, now)
        wait_s = max(before_s + max(terms.wait_s, first_s), place_s)
        predicted_s = wait_s + terms.own_s
        if wait_s > 0:  # or else it would be no sooner later, nor could a wrong guess turn out so
            foresight.check(predicted_s, now)
        return Admitted(choice.way.prompt(ask).seconds, choice, predicted_s)

    def _num_servers(self, now: float) -> int:
        groups = self._chooser.fields.groups(now)
        return max(1, sum(len(group.prefill) or len(group.decode) for group in groups))

    def _drained_s(self, held: Sequence[Waiting], now: float) -> float:
        """Until about all that waits has gone: prompts are computed, and answers have places, where
        the last dispatch found that these are lacking."""
        prompts_s = self._room.work_s / self._num_servers(now)
        lacking = (one.choice for one in held if one.lack is Lack.ROOM and one.choice)
        choice = next(lacking, None)
        if choice is None:
            return prompts_s
        num_each = len(self._room) // max(1, len(self._ledger.accounts[Leg.DECODE]))
        return max(prompts_s, choice.way.decode.place_in_s(num_each, now))

    def _places_s(self, way: Way, ask: Ask, now: float) -> tuple[float, float]:
        """Until its decode worker has a place for the first that waits, and for it after those
        whose turn is sooner."""
        num_workers = len(self._ledger.accounts[Leg.DECODE])
        num_before = self._room.num_before(ask) // max(1, num_workers)
        num_places = self._chooser.num_places(way, ask)
        if num_before + 1 <= num_places:
            return 0.0, 0.0
        num_later = num_before - int(num_places)
        first_s = 0.0 if num_places else way.decode.place_in_s(0, now)
        return first_s, way.decode.place_in_s(num_later, now)
