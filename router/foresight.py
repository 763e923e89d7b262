"""How first tokens come beside when they were predicted. Pure.

Under overload requests are admitted up to the objective itself: a prediction that is right on the
average would then break it for half of them, and one that is too low for all.
"""

from collections import deque
from typing import NamedTuple

from router.admission import check_time

SHARE = 0.95  # of the first tokens come no later than foreseen
KEPT_S = 30.0
NUM_KEPT = 32
_LEAST_KEPT = 8  # fewer say nothing
_LEAST, _MOST = 1.0, 10.0


class _Expected(NamedTuple):
    at: float
    seconds: float


class Foresight:
    """`factor`: by which a prediction is multiplied, so that `SHARE` of those near the objective
    come in time. Never less than one: that those of a while ago came sooner than predicted says
    nothing of a worker that has become full."""

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._expected: dict[str, _Expected] = {}
        self._ratios: deque[tuple[float, float]] = deque(maxlen=NUM_KEPT)  # when, and what it was
        self._factor = 1.0

    def factor(self, now: float) -> float:
        while self._ratios and self._ratios[0][0] < now - KEPT_S:
            self._ratios.popleft()
            self._count()
        return self._factor

    def check(self, predicted_s: float, now: float) -> None:
        """Refused is raised for what would come too late."""
        check_time(self.factor(now) * predicted_s, self._objective_s)

    def expect(self, request_id: str, predicted_s: float, now: float) -> None:
        self._expected[request_id] = _Expected(now, predicted_s)

    def came(self, request_id: str, now: float) -> None:
        """Only what was expected nearly as late as may be tells of what is: in the others there
        is more of what does not grow with the queue."""
        expected = self._expected.pop(request_id, None)
        if expected and expected.seconds >= self._objective_s / self.factor(now) / 2:
            self._ratios.append((now, (now - expected.at) / expected.seconds))
            self._count()

    def forget(self, request_id: str) -> None:
        self._expected.pop(request_id, None)

    def _count(self) -> None:
        ratios = sorted(ratio for _, ratio in self._ratios)
        enough = len(ratios) >= _LEAST_KEPT
        factor = ratios[int(SHARE * (len(ratios) - 1))] if enough else 1.0
        self._factor = min(_MOST, max(_LEAST, factor))
