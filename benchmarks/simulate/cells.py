"""The front tier of many cells: each request goes to one cell, whose router then chooses.

Rendezvous hashing over the branch key: what a conversation has in common with itself and not with
others. Prompts that begin alike meet in one cell, and a cell that comes or goes moves its own share
alone. A cell that has more than its share of the work is passed over for the next one.
"""

from collections.abc import Sequence
from hashlib import blake2b

from benchmarks.simulate.traffic import Request

BRANCH_DEPTH = 2  # blocks; all prompts of a trace may share the first one
MOST_LOAD = 1.25  # of the mean


class CellChoice:
    """Work is the prompt tokens that a cell was given and has not finished."""

    def __init__(self, num_cells: int) -> None:
        self._cells = [str(number).encode() for number in range(num_cells)]
        self._work = [0] * num_cells
        self.num_spilled = 0

    def choose(self, request: Request) -> int:
        if len(self._cells) == 1:
            return 0
        order = self._order(branch_key(request))
        most = MOST_LOAD * (sum(self._work) + request.num_tokens) / len(self._cells)
        first = order[0]
        chosen = next((cell for cell in order if self._work[cell] <= most), first)
        self.num_spilled += chosen != first
        self._work[chosen] += request.num_tokens
        return chosen

    def ended(self, cell: int, request: Request) -> None:
        if len(self._cells) > 1:
            self._work[cell] -= request.num_tokens

    def _order(self, key: bytes) -> list[int]:
        """The cell of a key comes first, the one it spills to next, and so on."""
        weights = [blake2b(key, key=cell, digest_size=8).digest() for cell in self._cells]
        return sorted(range(len(weights)), key=weights.__getitem__)


def branch_key(request: Request) -> bytes:
    names: Sequence[bytes] = request.names[:BRANCH_DEPTH]
    return names[-1] if len(names) == BRANCH_DEPTH else str(request.number).encode()
