"""Finds stop strings in text that comes in pieces, and holds back what may become one.

The answer does not depend on where the pieces are cut: text ends at the first character at
which any stop string ends, and of several that end there the longest counts.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    stop: str
    start: int  # in the text searched
    end: int


class StopMatcher:
    """Watches one choice; single use."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._seen = ""  # the end of the text so far that a stop string may begin with
        self._num_shown = 0  # characters of `_seen` that are out

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
        keep_from = len(seen) - self._num_held(seen)
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

    def _num_held(self, seen: str) -> int:
        """The length of the longest end of `seen` that some stop string begins with."""
        num_held = 0
        for stop in self._stops:
            start = seen.find(stop[0], max(0, len(seen) - len(stop) + 1))
            while start >= 0 and len(seen) - start > num_held:
                if stop.startswith(seen[start:]):
                    num_held = len(seen) - start
                    break
                start = seen.find(stop[0], start + 1)
        return num_held
