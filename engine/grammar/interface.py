"""What the runner needs of a compiled grammar, whichever library made it."""

from collections.abc import Sequence
from typing import Protocol


class GrammarState(Protocol):
    """Where one sequence is in its grammar. Used by one thread."""

    def fill(self, address: int, num_bytes: int) -> str | None:
        """Writes what may come next, to memory that the caller keeps: bit i of 32-bit word j is
        for token 32 * j + i. A text says why that cannot be known."""
        ...

    def accept(self, token_id: int) -> str | None:
        """The token came next; a text says why it cannot have."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing may come next but the end of the answer."""
        ...


class CompiledGrammar(Protocol):
    """Made on any thread, then used by one."""

    def start(self, token_ids: Sequence[int]) -> GrammarState:
        """The state after these tokens of an answer."""
        ...
