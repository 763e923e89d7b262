"""Turns as members of a request's JSON: token ids, text, or chat messages.

Written as text at once, since encoding a long list of ids takes longer than drawing them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Protocol

from cluster.bench.words import WORDS
from cluster.bench.workload import Piece, Turn

_KEPT_PIECES = 4096
_KEPT_CHARS = 64 << 20  # of them: each may have a million tokens


class PromptForm(StrEnum):
    TOKENS = "tokens"
    TEXT = "text"


@dataclass(frozen=True)
class Said:
    """An answer, as far as the next turn needs it."""

    text: str
    token_ids: tuple[int, ...] = ()


class Prompts(Protocol):
    def members(self, turns: Sequence[Turn], answers: Sequence[Said]) -> str:
        """The prompt of the last of these turns, the others having been answered so."""
        ...


class Drawing:
    """What pieces consist of: units drawn at random by the seed and the piece's name."""

    def __init__(
        self, units: Sequence[str], joint: str, seed: str, units_per_token: float = 1.0
    ) -> None:
        self.joint = joint
        self._units = units
        self._seed = seed
        self._units_per_token = units_per_token
        # Shared beginnings come again and again, and a conversation's turns. By their last use.
        self._kept: dict[Piece, str] = {}
        self._num_chars = 0  # of these

    def turn(self, turn: Turn) -> str:
        return self.joint.join(map(self._drawn, turn.pieces))

    def _drawn(self, piece: Piece) -> str:
        text = self._kept.pop(piece, None)
        if text is None:
            text = self._draw(piece)
            self._num_chars += len(text)
        self._kept[piece] = text
        while len(self._kept) > 1 and self._is_full():
            self._num_chars -= len(self._kept.pop(next(iter(self._kept))))
        return text

    def _is_full(self) -> bool:
        return len(self._kept) > _KEPT_PIECES or self._num_chars > _KEPT_CHARS

    def _draw(self, piece: Piece) -> str:
        num_units = max(1, round(piece.num_tokens * self._units_per_token))
        random = Random(f"{self._seed} {piece.name}")
        return self.joint.join(random.choices(self._units, k=num_units))


class TokenPrompts:
    def __init__(self, token_ids: Sequence[int], seed: str) -> None:
        self._drawing = Drawing([str(token_id) for token_id in token_ids], ",", seed)

    def members(self, turns: Sequence[Turn], answers: Sequence[Said]) -> str:
        parts = [self._drawing.turn(turns[0])]
        for answer, turn in zip(answers, turns[1:], strict=True):
            parts += [*map(str, answer.token_ids), self._drawing.turn(turn)]
        return f'"prompt":[{",".join(parts)}]'


class TextPrompts:
    def __init__(self, seed: str, words_per_token: float) -> None:
        self._drawing = Drawing(WORDS, " ", seed, words_per_token)

    def members(self, turns: Sequence[Turn], answers: Sequence[Said]) -> str:
        text = self._drawing.turn(turns[0])
        for answer, turn in zip(answers, turns[1:], strict=True):
            text += f"{answer.text}\n{self._drawing.turn(turn)}"
        return f'"prompt":{json.dumps(text)}'


class ChatPrompts:
    def __init__(self, seed: str, words_per_token: float) -> None:
        self._drawing = Drawing(WORDS, " ", seed, words_per_token)

    def members(self, turns: Sequence[Turn], answers: Sequence[Said]) -> str:
        messages = [{"role": "user", "content": self._drawing.turn(turns[0])}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages.append({"role": "assistant", "content": answer.text})
            messages.append({"role": "user", "content": self._drawing.turn(turn)})
        return f'"messages":{json.dumps(messages)}'
