"""Which of the prefill workers that a request names is asked next. Pure; time is passed in."""

import math
from collections import defaultdict
from collections.abc import Sequence

MAX_BREAKS = 2  # links: the data's connection, then the hand-off's own, which is found dead later
Candidate = tuple[str, int]  # address and incarnation; 0 is whichever is there


class Candidates:
    """Asked in order, each once; whoever failed or refused is not asked again.

    Those that could not be reached are gone through again and again, for `patience_s` from when
    nobody else was left, and until `latest`: a worker that is started anew is there again in a
    while. So may one be whose connection broke while it was asked; but not without end, as the
    prompt may be what ends it.
    """

    def __init__(
        self, named: Sequence[Candidate], patience_s: float = 0.0, latest: float = math.inf
    ) -> None:
        self._named = named
        self._patience_s = patience_s
        self._latest = latest
        self._failed: set[int] = set()
        self._unreached: set[int] = set()  # in this round
        self._broken: defaultdict[int, set[object]] = defaultdict(set)  # links to each
        self._give_up_at: float | None = None
        self._problems: dict[int, str] = {}  # the last of each

    def next(self) -> int | None:
        """The number of whom to ask; None at the end of a round."""
        passed = self._failed | self._unreached
        return next((i for i in range(len(self._named)) if i not in passed), None)

    def __getitem__(self, number: int) -> Candidate:
        return self._named[number]

    def note_failed(self, number: int, problem: str) -> None:
        self._failed.add(number)
        self._problems[number] = problem

    def note_unreached(self, number: int, problem: str) -> bool:
        """Whether that is news."""
        is_news = number not in self._problems
        self._unreached.add(number)
        self._problems[number] = problem
        return is_news

    def note_broke_off(self, number: int, problem: str, link: object) -> None:
        """Choices that ask each for itself notice the same link's end."""
        self._broken[number].add(link)
        if len(self._broken[number]) > MAX_BREAKS:
            self.note_failed(number, problem)
        else:
            self.note_unreached(number, problem)

    def begin_round(self, now: float) -> bool:
        """Whether there is somebody to be tried once more, and still time for it."""
        if self._give_up_at is None:
            self._give_up_at = min(now + self._patience_s, self._latest)
        if not self._unreached or now >= self._give_up_at:
            return False
        self._unreached.clear()
        return True

    @property
    def problems(self) -> str:
        told = [f"{self._named[i][0]}: {problem}" for i, problem in self._problems.items()]
        return "; ".join(told) or "none was named"
