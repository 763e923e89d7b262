"""Who is told to come back later. Pure."""

from enum import StrEnum

# There is no use in asking again at once.
MIN_RETRY_S = 1.0


class Refusal(StrEnum):
    FULL = "full"  # as many wait as may
    LATE = "late"  # its first token would come later than the operator wants


class Refused(Exception):
    """Nothing was done for the request. `predicted_s`: until its first token."""

    def __init__(
        self,
        reason: Refusal,
        retry_after_s: float,
        predicted_s: float | None = None,
        objective_s: float | None = None,
    ) -> None:
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.predicted_s = predicted_s
        self.objective_s = objective_s
        super().__init__(self._text())

    def _text(self) -> str:
        if self.reason is Refusal.FULL:
            return "too many requests wait"
        return (
            f"the first token would come in about {self.predicted_s:.1f} s, later than the"
            f" {self.objective_s:.1f} s that are wanted"
        )


def check_time(predicted_s: float, objective_s: float) -> None:
    """The excess is what has to be worked off before such a request could be taken."""
    if predicted_s > objective_s:
        retry_s = max(MIN_RETRY_S, predicted_s - objective_s)
        raise Refused(Refusal.LATE, retry_s, predicted_s, objective_s)
