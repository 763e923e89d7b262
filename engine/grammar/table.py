"""Where the running sequences are in their grammars, by slot."""

from collections.abc import Iterable, Sequence

import numpy as np

from engine.grammar.entered import EnteredState
from engine.grammar.interface import CompiledGrammar, GrammarState
from engine.grammar.opening import OpenedState
from engine.grammar.value import Reasoning, Tokens
from engine.sampler.interface import Draws, IntArray
from engine.step import GRAMMAR_FAILED, Sample

_ALL = np.int32(-1)


class GrammarTable:
    """A slot's state is made from its tokens when it is entered, so whatever brings a sequence
    to its slot (a fork, the end of a preemption, an answer that another engine began) is the
    same here. A state that nobody uses any more stays until its slot is entered again."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._num_words = -(-vocab_size // 32)
        self._eos_token_ids = eos_token_ids
        self._states: dict[int, GrammarState] = {}
        self._problems: dict[int, str] = {}

    def enter(
        self,
        slot: int,
        grammar: CompiledGrammar | None,
        output: Sequence[int],
        reasoning: Reasoning | None = None,
        exits: Sequence[Tokens] = (),
        entries: Sequence[Tokens] = (),
    ) -> None:
        """`output` is what the sequence has said so far."""
        if grammar is None:
            self._states.pop(slot, None)
        elif entries:
            self._states[slot] = EnteredState(grammar, reasoning, entries, output)
        elif reasoning is None and not exits:
            self._states[slot] = grammar.start(output)
        else:
            ends = self._eos_token_ids
            self._states[slot] = OpenedState(grammar, reasoning, exits, ends, output)

    def follows(self, slots: Iterable[int]) -> bool:
        """Whether it must be told of what is drawn for them."""
        return any(slot in self._states for slot in slots)

    def masks(self, draws: Draws) -> IntArray | None:
        """[rows of logits, words], or None where every draw is free. Draws from one row are
        choices that are about to part, so what goes for one of them goes for all."""
        self._problems = {}
        if not self._states:
            return None
        rows = {
            row: slot
            for slot, row in zip(draws.slots.tolist(), draws.logit_rows.tolist(), strict=True)
            if slot in self._states and not self._states[slot].is_free
        }
        if not rows:
            return None
        masks = np.full((int(draws.logit_rows.max()) + 1, self._num_words), _ALL)
        for row, slot in rows.items():
            problem = self._states[slot].fill(masks[row])
            if problem is not None:
                self._problems[slot] = problem
                masks[row] = _ALL
        return masks

    def complete(self, slots: Iterable[int]) -> list[int]:
        """Those of the slots whose answer can only end."""
        return [s for s in slots if s in self._states and self._states[s].is_complete]

    def accept(self, samples: Iterable[Sample]) -> dict[int, str]:
        """Takes what was drawn; slots that fail, and why."""
        problems = self._problems
        for slot, token_id, _ in samples:
            state = self._states.get(slot)
            if state is not None and slot not in problems:
                problem = state.accept(token_id)
                if problem is not None:
                    problems[slot] = problem
        return {slot: f"{GRAMMAR_FAILED}{problem}" for slot, problem in problems.items()}
