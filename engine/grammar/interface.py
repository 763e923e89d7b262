"""What the runner needs of a compiled grammar, whichever library made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # ingresses try grammars, and load no numpy
    import numpy as np
    import numpy.typing as npt

    Bits = npt.NDArray[np.int32]


class GrammarState(Protocol):
    """Where one sequence is in its grammar. Used by one thread."""

    def fill(self, bits: Bits) -> str | None:
        """Writes what may come next: bit i of word j is for token 32 * j + i. A text says why that
        cannot be known."""
        ...

    def accept(self, token_id: int) -> str | None:
        """The token came next; a text says why it cannot have."""
        ...

    @property
    def is_free(self) -> bool:
        """Anything may come next."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing may come next but the end of the answer."""
        ...


class CompiledGrammar(Protocol):
    """Made on any thread, then used by one."""

    @property
    def is_spent(self) -> bool:
        """Its states can learn no more: who comes next needs another. May be asked by any
        thread."""
        ...

    def start(self, token_ids: Sequence[int]) -> GrammarState:
        """The state after these tokens of an answer."""
        ...
