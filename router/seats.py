"""The sequences of one decode worker, and its room for their tokens. Pure."""

from collections import deque
from heapq import nsmallest
from math import exp
from typing import NamedTuple

from router.workers import Load

# What was given so shortly before a report may not be in it yet, and what has ended still be.
GRACE_S = 0.05
_MOST_LEFT = 4096
RECENT_S = 1.0  # steps so long ago count a third


class Seat(NamedTuple):
    """Of one request at a decode worker."""

    num_sequences: int
    num_context_tokens: float  # that its steps will read, halfway through its answer
    num_reserved_tokens: int
    given: float
    num_new: int = 0  # expected of each answer
    since: float = 0.0  # when it was given, or its first token came
    since_step: float = 0.0  # of the worker's


class Pace:
    """How fast a worker's steps follow each other: all that holds it up is in it, which is not in
    what a step takes by itself."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._at = 0.0
        self._runs = False
        # Of late, each counting less the older it is. What was not seen yet is as it should be.
        self._steps = 0.0
        self._steps_s = 0.0
        self._took_s = self._alone_s = RECENT_S

    def hear(self, load: Load, alone_s: float) -> None:
        steps, seconds = load.num_steps - self._num_steps, load.at - self._at
        if self._runs and load.num_running and steps > 0 and seconds > 0:
            kept = exp(-seconds / RECENT_S)
            self._steps = kept * self._steps + steps
            self._steps_s = kept * self._steps_s + seconds
            if alone_s > 0:
                self._took_s = kept * self._took_s + seconds
                self._alone_s = kept * self._alone_s + steps * alone_s
        self._num_steps, self._at = load.num_steps, load.at
        self._runs = load.num_running > 0

    @property
    def step_s(self) -> float:
        """0: not known yet."""
        return self._steps_s / self._steps if self._steps else 0.0

    @property
    def slowness(self) -> float:
        """How many times as long steps take as they should. Of sums: an answer is as slow as its
        steps are, of which few fit into the time of a prompt's."""
        return max(1.0, self._took_s / self._alone_s)

    def step_at(self, now: float) -> float:
        """The number of the step that it makes then."""
        if not self._runs or not self.step_s:
            return self._num_steps
        return self._num_steps + (now - self._at) / self.step_s


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
        self.pace = Pace()
        self.num_free_tokens = float("inf")
        self.num_sequences = 0
        self.num_context_tokens = 0.0

    def __len__(self) -> int:
        return len(self._own)

    def take(self, request_id: str, seat: Seat) -> None:
        self._own[request_id] = self._from_now_on(seat, seat.given)
        self._add(seat, 1)

    def began(self, request_id: str, now: float) -> None:
        """Its first token came."""
        seat = self._own.get(request_id)
        if seat is not None:
            self._own[request_id] = self._from_now_on(seat, now)

    def release(self, request_id: str, now: float) -> None:
        seat = self._own.pop(request_id, None)
        if seat is not None:
            self._left.append((now, seat))
            self._add(seat, -1)

    def report(self, load: Load, alone_s: float = 0.0) -> None:
        """Others' are what it counts beyond ours. Short answers would else make a full worker of
        one that has just become empty, until it reports again. `alone_s`: what its step should
        take."""
        left = [seat for at, seat in self._left if at >= load.at - GRACE_S]
        sequences = self._own_sequences + sum(seat.num_sequences for seat in left)
        context = self._own_context + sum(seat.num_context_tokens for seat in left)
        self._left.clear()
        self.pace.hear(load, alone_s)
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
        pace = self.pace
        step_now = pace.step_at(now)

        def steps_left(seat: Seat) -> float:
            made = step_now - seat.since_step if pace.step_s else (now - seat.since) / step_s
            return seat.num_new - made

        rounds, number = divmod(num_before, len(self._own))
        leaver = nsmallest(number + 1, self._own.values(), key=steps_left)[-1]
        num_steps = steps_left(leaver) + rounds * leaver.num_new
        if num_steps <= 0:  # who stays for longer than expected may leave at any moment
            num_steps = (number + 1) * leaver.num_new / self.num_sequences
        return num_steps * (pace.step_s or step_s)

    def _from_now_on(self, seat: Seat, now: float) -> Seat:
        return seat._replace(since=now, since_step=self.pace.step_at(now))

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
