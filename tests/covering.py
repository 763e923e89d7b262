"""Which of many cases suffice for every two values of two axes to meet."""

from collections.abc import Hashable, Sequence
from itertools import combinations


def covering(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Numbers of cases, in order: every two values, each of its axis, that meet in any case meet
    in one of these."""
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(missing & pairs[number]))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)
