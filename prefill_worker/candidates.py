"""Which of the prefill workers that a request names is asked next. Pure; time is passed in."""

import math
from collections import defaultdict
from collections.abc import Sequence

MAX_BREAKS = 2  # links: the data's connection, then the hand-off's own, which is found dead later
PAUSE_S = 0.1  # between rounds of those that were not reached; links have pauses of their own
LONGEST_PAUSE_S = 2.0  # between rounds in which the busy are asked, each twice the one before
Candidate = tuple[str, int]  # address and incarnation; 0 is whichever is there


class Candidates:
    """Asked in order, each once; whoever failed or refused is not asked again.

    Those that could not be reached are gone through again and again, for `patience_s` from when
    nobody else was left, and until `latest`: a worker that is started anew is there again in a
    while. So may one be whose connection broke while it was asked; but not without end, as the
    prompt may be what ends it. Who is busy is asked again with them, or, with `until_free`, for as
    long as it says so, until `latest`.
    """

    def __init__(
        self,
        named: Sequence[Candidate],
        patience_s: float = 0.0,
        latest: float = math.inf,
        until_free: bool = False,
    ) -> None:
        self._named = named
        self._patience_s = patience_s
        self._latest = latest
        self._until_free = until_free
        self._failed: set[int] = set()
        self._unreached: set[int] = set()  # in this round
        self._busy: set[int] = set()  # in this round
        self._pause_s = PAUSE_S
        self._broken: defaultdict[int, set[object]] = defaultdict(set)  # links to each
        self._give_up_at: float | None = None
        self._problems: dict[int, str] = {}  # the last of each

    def next(self) -> int | None:
        """The number of whom to ask; None at the end of a round."""
        passed = self._failed | self._unreached | self._busy
        return next((i for i in range(len(self._named)) if i not in passed), None)

    def __getitem__(self, number: int) -> Candidate:
        return self._named[number]

    def note_failed(self, number: int, problem: str) -> None:
        self._failed.add(number)
        self._problems[number] = problem

    def note_unreached(self, number: int, problem: str) -> bool:
        """Whether that is news."""
        self._unreached.add(number)
        return self._is_news(number, problem)

    def note_busy(self, number: int, problem: str) -> bool:
        """Whether that is news."""
        self._busy.add(number)
        return self._is_news(number, problem)

    def _is_news(self, number: int, problem: str) -> bool:
        is_news = number not in self._problems
        self._problems[number] = problem
        return is_news

    def note_broke_off(self, number: int, problem: str, link: object) -> None:
        """Choices that ask each for itself notice the same link's end."""
        self._broken[number].add(link)
        if len(self._broken[number]) > MAX_BREAKS:
            self.note_failed(number, problem)
        else:
            self.note_unreached(number, problem)

    def begin_round(self, now: float) -> float | None:
        """Seconds until it; None: there is nobody to be tried once more, or no time for it."""
        is_waiting = self._until_free and bool(self._busy)
        if is_waiting:
            self._give_up_at = None
        elif self._give_up_at is None:
            self._give_up_at = min(now + self._patience_s, self._latest)
        give_up_at = self._latest if self._give_up_at is None else self._give_up_at
        if not (is_waiting or self._unreached) or now >= give_up_at:
            return None
        self._unreached.clear()
        self._busy.clear()
        if not is_waiting:
            return PAUSE_S
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return min(pause_s, self._latest - now)

    @property
    def some_are_busy(self) -> bool:
        """When the last round ended."""
        return bool(self._busy)

    @property
    def problems(self) -> str:
        told = [f"{self._named[i][0]}: {problem}" for i, problem in self._problems.items()]
        return "; ".join(told) or "none was named"
