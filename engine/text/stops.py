"""Finds stop strings in text that comes in pieces, and holds back what may become one.

The answer does not depend on where the pieces are cut: text ends at the first character at
which any stop string ends, and of several that end there the longest counts.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class StopMatch(NamedTuple):
    stop: str
    start: int  # in the text searched
    end: int


class StopMatcher:
    """Watches one choice; single use. What it takes does not grow with the text that it holds."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._seen = ""  # the end of the text so far that a stop string may begin with
        self._num_shown = 0  # characters of `_seen` that are out
        self._begun = [_Begun(stop) for stop in self._stops]

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that may be shown, and the stop string that ended it, if one did.

        Where `may_stop` is false no match may end inside `text`.
        """
        if not self._stops:
            return text, None
        num_old = len(self._seen)
        seen = self._seen + text
        match = self._first_match(seen, num_old) if may_stop else None
        if match is not None:
            end = match.end if self._include_stop else match.start
            shown, self._seen = seen[self._num_shown : end], ""
            return shown, match.stop
        keep_from = len(seen) - max(begun.follow(text) for begun in self._begun)
        end = len(seen) if self._include_stop else keep_from
        shown = seen[self._num_shown : end]
        self._seen, self._num_shown = seen[keep_from:], end - keep_from
        return shown, None

    def finish(self) -> str:
        """What was held back, when the text ends without a stop string."""
        rest, self._seen = self._seen[self._num_shown :], ""
        return rest

    def _first_match(self, seen: str, num_old: int) -> StopMatch | None:
        best: StopMatch | None = None
        for stop in self._stops:
            start = seen.find(stop, max(0, num_old - len(stop) + 1))
            if start < 0:
                continue
            match = StopMatch(stop, start, start + len(stop))
            if best is None or (match.end, match.start) < (best.end, best.start):
                best = match
        return best


class _Begun:
    """How much of a stop string's beginning, but not all of it, a text ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._shorter: Sequence[int] = ()
        self._length = 0

    def follow(self, text: str) -> int:
        """The same with what comes next of the text."""
        stop, length = self._stop, self._length
        if not length and stop[0] not in text:
            return 0
        shorter = self._shorter = self._shorter or _shorter(stop)
        for char in text:
            while length and char != stop[length]:
                length = shorter[length]
            length += char == stop[length]
            if length == len(stop):
                length = shorter[length]
        self._length = length
        return length


@lru_cache(maxsize=64)  # choices of one request have the same
def _shorter(stop: str) -> Sequence[int]:
    """For each length of a beginning of the stop string, that of the next shorter one with which
    this beginning ends (Knuth, Morris and Pratt)."""
    shorter, length = [0, 0], 0
    for char in stop[1:]:
        while length and char != stop[length]:
            length = shorter[length]
        length += char == stop[length]
        shorter.append(length)
    return shorter
