"""The sequences of one decode worker, and its room for their tokens. Pure."""

from collections import deque
from itertools import islice
from typing import NamedTuple

from router.workers import Load

# What was given so shortly before a report may not be in it yet, and what has ended still be.
GRACE_S = 0.05
_MOST_LEFT = 4096


class Seat(NamedTuple):
    """Of one request at a decode worker."""

    num_sequences: int
    num_context_tokens: float  # that its steps will read, halfway through its answer
    num_reserved_tokens: int
    given: float
    num_new: int = 0  # expected of each answer


class Seats:
    """The sequences of one decode worker, and its room for their tokens."""

    def __init__(self) -> None:
        self._own: dict[str, Seat] = {}
        self._left: deque[tuple[float, Seat]] = deque(maxlen=_MOST_LEFT)  # when, since the report
        self._own_sequences = 0
        self._own_context = 0.0
        self._own_reserved = 0
        self._others_sequences = 0
        self._others_context = 0.0
        self._free = float("inf")  # for us, had we nothing there that the report lacks
        self.num_free_tokens = float("inf")
        self.num_sequences = 0
        self.num_context_tokens = 0.0

    def __len__(self) -> int:
        return len(self._own)

    def take(self, request_id: str, seat: Seat) -> None:
        self._own[request_id] = seat
        self._add(seat, 1)

    def release(self, request_id: str, now: float) -> None:
        seat = self._own.pop(request_id, None)
        if seat is not None:
            self._left.append((now, seat))
            self._add(seat, -1)

    def report(self, load: Load) -> None:
        """Others' are what it counts beyond ours. Short answers would else make a full worker of
        one that has just become empty, until it reports again."""
        left = [seat for at, seat in self._left if at >= load.at - GRACE_S]
        sequences = self._own_sequences + sum(seat.num_sequences for seat in left)
        context = self._own_context + sum(seat.num_context_tokens for seat in left)
        self._left.clear()
        self._others_sequences = max(0, load.num_sequences - sequences)
        self._others_context = max(0.0, load.num_context_tokens - context)
        if load.num_total_tokens:
            self._free = load.num_free_tokens + self._num_counted(load.at - GRACE_S)
        self._sum()

    def place_in_s(self, num_before: int, step_s: float, now: float) -> float:
        """Until there is a place for one more after so many others, by what we gave. Who came
        together leaves together."""
        if not self._own:
            return 0.0
        rounds, number = divmod(num_before, len(self._own))
        leaver = next(islice(self._own.values(), number, None))
        stay_s = leaver.num_new * step_s
        left_s = leaver.given + (rounds + 1) * stay_s - now
        # Who stays for longer than expected may leave at any moment.
        return left_s if left_s > 0 else (number + 1) * stay_s / self.num_sequences

    def _num_counted(self, before: float) -> int:
        """Tokens of ours that a report has taken off already."""
        late = 0
        for seat in reversed(self._own.values()):
            if seat.given <= before:
                break
            late += seat.num_reserved_tokens
        return self._own_reserved - late

    def _add(self, seat: Seat, sign: int) -> None:
        self._own_sequences += sign * seat.num_sequences
        self._own_context += sign * seat.num_context_tokens
        self._own_reserved += sign * seat.num_reserved_tokens
        self._sum()

    def _sum(self) -> None:
        self.num_sequences = self._own_sequences + self._others_sequences
        self.num_context_tokens = self._own_context + self._others_context
        self.num_free_tokens = self._free - self._own_reserved
