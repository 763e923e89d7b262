"""How first tokens come beside when they were predicted. Pure.

Under overload requests are admitted up to the objective itself: a prediction that is right on the
average would then break it for half of them, and one that is too low for all.
"""

from math import exp
from typing import NamedTuple

from router.admission import check_time

LATE_SHARE = 0.02  # of the first tokens near the objective may come too late
FADE_S = 30.0  # what was learnt counts a third after so long
_STEP = 0.1  # of the factor, for one that is late
_LEAST, _MOST = 1.0, 10.0


class _Expected(NamedTuple):
    at: float
    seconds: float


class Foresight:
    """`factor`: by which a prediction is multiplied. Each first token that comes too late raises
    it, and each that comes in time lowers it by so much less that it rests where `LATE_SHARE` of
    them are late. Never less than one: that those of a while ago came sooner than predicted says
    nothing of a worker that has become full."""

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._expected: dict[str, _Expected] = {}
        self._factor = 1.0
        self._at = 0.0

    def factor(self, now: float) -> float:
        """Fades, or else nothing might be admitted from which it could be seen that it is wrong."""
        self._factor = 1.0 + (self._factor - 1.0) * exp(min(0.0, self._at - now) / FADE_S)
        self._at = now
        return self._factor

    def check(self, predicted_s: float, now: float) -> None:
        """Refused is raised for what would come too late."""
        check_time(self.factor(now) * predicted_s, self._objective_s)

    def expect(self, request_id: str, predicted_s: float, now: float) -> None:
        """What was taken though it would be late is late by no mistake."""
        if predicted_s <= self._objective_s:
            self._expected[request_id] = _Expected(now, predicted_s)

    def came(self, request_id: str, now: float) -> None:
        """One that could hardly be late says nothing by being in time."""
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        factor = self.factor(now)
        if now - expected.at > self._objective_s:
            factor *= 1 + _STEP
        elif expected.seconds * factor >= self._objective_s / 2:
            factor *= (1 + _STEP) ** (-LATE_SHARE / (1 - LATE_SHARE))
        self._factor = min(_MOST, max(_LEAST, factor))

    def forget(self, request_id: str) -> None:
        self._expected.pop(request_id, None)
