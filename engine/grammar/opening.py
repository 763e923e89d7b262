"""An answer that may begin with what its grammar knows nothing of."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from engine.grammar.bits import allow, forbid
from engine.grammar.interface import CompiledGrammar, GrammarState
from engine.grammar.value import Reasoning, Tokens

if TYPE_CHECKING:
    from engine.grammar.interface import Bits


class _To(Enum):
    REASONING = auto()
    FITTING = auto()
    FREE = auto()


class _Way(NamedTuple):
    """Tokens that come next, and what is behind them."""

    tokens: Sequence[int]
    to: _To


class OpenedState:
    """The end of the answer is none of the reasoning's words: the grammar may not have begun."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        reasoning: Reasoning | None,
        exits: Sequence[Tokens],
        eos_token_ids: Sequence[int],
        token_ids: Sequence[int],
    ) -> None:
        self._grammar = grammar
        self._reasoning = reasoning
        self._eos_token_ids = eos_token_ids
        self._within: _To | None = None  # where any token may come
        self._ways: list[_Way] = []
        self._fitting: GrammarState | None = None  # beside the ways that are left, or behind all
        ways = _ways((), exits)
        if reasoning is not None:
            begins = _Way(reasoning.start, _To.REASONING)
            ways = [begins, *(_ways(reasoning.instead, exits) if reasoning.start else ())]
        self._go(ways)
        self._follow(list(token_ids))

    def fill(self, bits: Bits) -> str | None:
        if self._within is not None:
            bits[:] = -1
            if self._within is _To.REASONING:
                forbid(bits, self._eos_token_ids)
            return None
        bits[:] = 0
        problem = None if self._fitting is None else self._fitting.fill(bits)
        allow(bits, [way.tokens[0] for way in self._ways])
        return problem

    def accept(self, token_id: int) -> str | None:
        if self._within is not None:
            reasoning = self._reasoning
            if self._within is _To.REASONING and reasoning and token_id == reasoning.end:
                self._go(_ways(reasoning.then, reasoning.exits))
            return None
        ways = [_Way(to[1:], kind) for to, kind in self._ways if to[0] == token_id]
        problem: str | None = "a token beside those that an answer begins with"
        if self._fitting is not None:
            problem = self._fitting.accept(token_id)
        if problem is not None:
            self._fitting = None
        self._go(ways)
        return None if ways else problem

    @property
    def is_free(self) -> bool:
        return self._within is _To.FREE

    @property
    def is_complete(self) -> bool:
        return self._fitting is not None and not self._ways and self._fitting.is_complete

    def _go(self, ways: Sequence[_Way]) -> None:
        """Where one of them has ended it is there."""
        there = {way.to for way in ways if not way.tokens}
        self._ways = [way for way in ways if way.tokens]
        if _To.FITTING in there:
            self._fitting = self._grammar.start(())
        self._within = next((one for one in (_To.FREE, _To.REASONING) if one in there), None)
        if self._within is not None:
            self._ways, self._fitting = [], None

    def _follow(self, tokens: list[int]) -> None:
        at = fits_from = 0
        while at < len(tokens) and self._within is not _To.FREE:
            if self._within is _To.REASONING and self._reasoning is not None:
                rest = tokens[at:]
                end = self._reasoning.end
                at = at + rest.index(end) if end in rest else len(tokens) - 1
            elif not self._ways:
                self._fitting = self._grammar.start(tokens[fits_from:])
                return
            before = self._fitting
            self.accept(tokens[at])
            at += 1
            if self._fitting is not before:
                fits_from = at


def _ways(to_what_fits: Tokens, exits: Sequence[Tokens]) -> list[_Way]:
    return [_Way(to_what_fits, _To.FITTING), *(_Way(tokens, _To.FREE) for tokens in exits)]
