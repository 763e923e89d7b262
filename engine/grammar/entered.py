"""An answer that is free until it comes to what its grammar is of, and again behind that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.grammar.bits import allow
from engine.grammar.interface import CompiledGrammar, GrammarState
from engine.grammar.value import Reasoning, Tokens

if TYPE_CHECKING:
    from engine.grammar.interface import Bits


class EnteredState:
    """Entries count nothing in the reasoning that the answer may begin with."""

    is_complete = False

    def __init__(
        self,
        grammar: CompiledGrammar,
        reasoning: Reasoning | None,
        entries: Sequence[Tokens],
        token_ids: Sequence[int],
    ) -> None:
        self._grammar = grammar
        self._entries = entries
        self._reasoning = reasoning
        self._reasons = reasoning is not None and not reasoning.start
        self._begins = reasoning.start if reasoning else ()  # reasoning, if they are all that comes
        self._begun: list[Tokens] = []  # what is left of entries
        self._is_entered = False
        self._fitting: GrammarState | None = None
        for token_id in token_ids:
            self.accept(token_id)

    @property
    def is_free(self) -> bool:
        return not self._is_entered

    def fill(self, bits: Bits) -> str | None:
        if self.is_free:
            bits[:] = -1
            return None
        bits[:] = 0
        problem = None if self._fitting is None else self._fitting.fill(bits)
        allow(bits, [left[0] for left in self._begun])
        return problem

    def accept(self, token_id: int) -> str | None:
        if self._is_reasoning(token_id):
            return None
        begun = [left[1:] for left in self._begun if left[0] == token_id]
        problem = None
        if self._is_entered:
            problem = "a token beside those that stand before what must fit"
            if self._fitting is not None:
                problem = self._fitting.accept(token_id)
        else:
            begun += [entry[1:] for entry in self._entries if entry[0] == token_id]
        if () in begun:
            self._is_entered, self._fitting = True, self._grammar.start(())
        elif problem is not None:
            self._fitting = None
        self._begun = [left for left in begun if left]
        if self._fitting is not None and self._fitting.is_complete and not self._begun:
            self._is_entered, self._fitting = False, None
        return None if begun else problem

    def _is_reasoning(self, token_id: int) -> bool:
        if self._reasons:
            assert self._reasoning is not None
            self._reasons = token_id != self._reasoning.end
            return True
        if self._begins:
            goes_on = self._begins[0] == token_id
            self._begins = self._begins[1:] if goes_on else ()
            self._reasons = goes_on and not self._begins
        return self._reasons
