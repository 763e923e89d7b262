"""An answer that may begin with reasoning, and fits its grammar from there on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.grammar.interface import CompiledGrammar, GrammarState
from engine.grammar.value import Reasoning

if TYPE_CHECKING:
    from engine.grammar.interface import Bits

_BITS = 32


class ReasonedState:
    """The end of the answer is none of the reasoning's words: the grammar may not have begun."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        reasoning: Reasoning,
        eos_token_ids: Sequence[int],
        token_ids: Sequence[int],
    ) -> None:
        self._grammar = grammar
        self._start, self._end = reasoning.start, reasoning.end
        self._eos_token_ids = eos_token_ids
        self._may_begin = self._start is not None and not token_ids
        self._behind: GrammarState | None = None  # the reasoning; None: within
        tokens = list(token_ids)
        if self._start is not None and tokens[:1] != [self._start]:
            self._behind = grammar.start(tokens)
        elif self._end in tokens:
            self._behind = grammar.start(tokens[tokens.index(self._end) + 1 :])

    def fill(self, bits: Bits) -> str | None:
        if self._behind is None:
            bits[:] = -1
            _set(bits, self._eos_token_ids, allowed=False)
            return None
        problem = self._behind.fill(bits)
        if self._may_begin and self._start is not None:
            _set(bits, (self._start,), allowed=True)
        return problem

    def accept(self, token_id: int) -> str | None:
        begins, self._may_begin = self._may_begin and token_id == self._start, False
        if begins:
            self._behind = None
        elif self._behind is not None:
            return self._behind.accept(token_id)
        elif token_id == self._end:
            self._behind = self._grammar.start(())
        return None

    @property
    def is_complete(self) -> bool:
        return self._behind is not None and not self._may_begin and self._behind.is_complete


def _set(bits: Bits, token_ids: Sequence[int], *, allowed: bool) -> None:
    words = bits.view(np.uint32)
    for token_id in token_ids:
        bit = np.uint32(1 << token_id % _BITS)
        if allowed:
            words[token_id // _BITS] |= bit
        else:
            words[token_id // _BITS] &= ~bit
