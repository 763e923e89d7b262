"""An answer that may begin with reasoning, and fits its grammar from there on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.grammar.interface import CompiledGrammar, GrammarState
from engine.grammar.value import Reasoning

if TYPE_CHECKING:
    from engine.grammar.interface import Bits

_BITS = 32


class _Way(NamedTuple):
    """Tokens that come next, and whether reasoning is behind them or what must fit."""

    tokens: Sequence[int]
    reasons: bool


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
        self._reasoning = reasoning
        self._eos_token_ids = eos_token_ids
        self._is_within = not reasoning.start
        self._ways: list[_Way] = []
        self._behind: GrammarState | None = None  # all of that
        if reasoning.start:
            self._go([_Way(reasoning.start, True), _Way(reasoning.instead, False)])
        self._follow(list(token_ids))

    def fill(self, bits: Bits) -> str | None:
        if self._is_within:
            bits[:] = -1
            _set(bits, self._eos_token_ids, allowed=False)
            return None
        bits[:] = 0
        problem = None if self._behind is None else self._behind.fill(bits)
        _set(bits, [way.tokens[0] for way in self._ways], allowed=True)
        return problem

    def accept(self, token_id: int) -> str | None:
        if self._is_within:
            if token_id == self._reasoning.end:
                self._go([_Way(self._reasoning.then, False)])
            return None
        ways = [_Way(to[1:], reasons) for to, reasons in self._ways if to[0] == token_id]
        if ways or self._behind is None:
            self._go(ways)
            return None if ways else "a token beside those that stand around reasoning"
        self._ways = []
        return self._behind.accept(token_id)

    @property
    def is_complete(self) -> bool:
        return self._behind is not None and not self._ways and self._behind.is_complete

    def _go(self, ways: Sequence[_Way]) -> None:
        """Where one of them has ended it is there."""
        there = [way.reasons for way in ways if not way.tokens]
        self._is_within = True in there
        self._ways = [] if self._is_within else [way for way in ways if way.tokens]
        self._behind = self._grammar.start(()) if there and not self._is_within else None

    def _follow(self, tokens: list[int]) -> None:
        at = 0
        while at < len(tokens):
            if self._is_within:
                rest = tokens[at:]
                end = self._reasoning.end
                at = at + rest.index(end) if end in rest else len(tokens) - 1
            elif all(way.tokens[0] != tokens[at] for way in self._ways):
                self._ways = []
                self._behind = self._grammar.start(tokens[at:])
                return
            self.accept(tokens[at])
            at += 1


def _set(bits: Bits, token_ids: Sequence[int], *, allowed: bool) -> None:
    words = bits.view(np.uint32)
    for token_id in token_ids:
        bit = np.uint32(1 << token_id % _BITS)
        if allowed:
            words[token_id // _BITS] |= bit
        else:
            words[token_id // _BITS] &= ~bit
