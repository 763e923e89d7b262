"""What is kept of a request."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.bench.answer import Failure, Usage


@dataclass(frozen=True)
class Record:
    """One request and what came of it. Times are in seconds of the run."""

    conversation: int
    turn: int
    num_asked: int  # tokens of output
    due_s: float | None  # when the workload wanted it sent, if it says
    sent_s: float
    first_s: float | None
    last_s: float | None
    end_s: float
    gaps_s: Sequence[float]
    usage: Usage | None
    failure: Failure | None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time of an output token after the first."""
        if self.first_s is None or self.last_s is None or self.num_output < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_output - 1)

    @property
    def total_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def late_s(self) -> float | None:
        """How much later than it was due it was sent: what the generator itself adds."""
        return None if self.due_s is None else self.sent_s - self.due_s

    @property
    def num_output(self) -> int:
        return 0 if self.usage is None else self.usage.num_output
