"""How many threads repeat a step, by what steps of late took.

More of them need not be faster. A step of a small model is many short jobs, each on what other
threads have just written; and who else wants the cores, as an HTTP front does, is told by nothing
but time. So another number is tried now and then, and twice as many threads are kept only where
they take a fifth off a step: what they take off less, others of the machine can use better.
"""

from collections import deque
from statistics import median

WORTH = 0.8  # of a step's time is left at most where twice as many threads are worth it
RUNS = 9  # of late, whose median counts
TRIAL, WARMING = 5, 2  # runs of a trial, and those before them: what is in the caches has to move
SOONEST, LATEST = 32, 2048  # runs between trials: twice as many after each that changed nothing


class ThreadChoice:
    """For steps that take about as long as each other."""

    def __init__(self, most: int) -> None:
        powers = [1 << i for i in range(most.bit_length())]
        self._numbers = sorted({*powers, most})
        self._chosen = self._tried = len(self._numbers) - 1
        self._goes_down = True  # the next trial
        self._wait = self._left = SOONEST
        self._late: deque[int] = deque(maxlen=RUNS)
        self._trial: list[int] = []

    @property
    def number(self) -> int:
        return self._numbers[self._tried]

    def note(self, took: int) -> None:
        """What a step took with so many, in any unit."""
        if self._tried != self._chosen:
            self._trial.append(took)
            if len(self._trial) == WARMING + TRIAL:
                self._decide()
            return
        self._late.append(took)
        self._left -= 1
        if self._left <= 0 and len(self._late) == RUNS:
            self._try_another()

    def _try_another(self) -> None:
        last = len(self._numbers) - 1
        if last == 0:
            return
        down = self._chosen == last or (self._goes_down and self._chosen > 0)
        self._tried = self._chosen + (-1 if down else 1)
        self._goes_down = not down

    def _decide(self) -> None:
        fewer, more = median(self._late), median(self._trial[WARMING:])
        if self._tried < self._chosen:
            fewer, more = more, fewer
        is_worth_more = more <= WORTH * fewer
        if is_worth_more == (self._tried > self._chosen):
            self._chosen, self._wait = self._tried, SOONEST
        else:
            self._tried, self._wait = self._chosen, min(2 * self._wait, LATEST)
        self._left = self._wait
        self._late.clear()
        self._trial.clear()
