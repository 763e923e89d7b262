"""What is asked: conversations of turns, each a few named pieces of prompt and an answer's length.

Pure and seeded. A piece's tokens depend on its name and the seed alone, and a shorter piece is the
beginning of a longer one of the same name: equal names are what prefix caches can find again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import NamedTuple, Protocol

from cluster.bench.lengths import Fixed, Lengths


class Piece(NamedTuple):
    """A part of a prompt; its text is drawn by `prompts.py`."""

    name: str
    num_tokens: int


@dataclass(frozen=True)
class Turn:
    """What the user adds to a conversation, and how many tokens the answer is to have."""

    pieces: tuple[Piece, ...]
    num_output: int

    @property
    def num_input(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True)
class Conversation:
    number: int
    turns: tuple[Turn, ...]
    at_s: float | None = None  # since the beginning of the trace that it comes from


class Workload(Protocol):
    @property
    def many_turns(self) -> bool:
        """Whether a conversation may have more than one."""
        ...

    def conversations(self) -> Iterator[Conversation]:
        """The same ones each time; may have no end."""
        ...


@dataclass(frozen=True)
class Synthetic:
    """Conversations without end, of drawn lengths.

    `prefix_share` of the first prompt's tokens is one of `prefix_groups` beginnings that
    conversations share. Every further turn adds as many tokens as `input_tokens` says.
    """

    input_tokens: Lengths
    output_tokens: Lengths
    seed: int = 0
    prefix_share: float = 0.0
    prefix_groups: int = 1
    turns: Lengths = Fixed(1)

    @property
    def many_turns(self) -> bool:
        return self.turns != Fixed(1)

    def conversations(self) -> Iterator[Conversation]:
        return (self._conversation(number) for number in count())

    def _conversation(self, number: int) -> Conversation:
        random = Random(f"conversation {self.seed} {number}")
        turns = tuple(self._turn(random, number, turn) for turn in range(self.turns.draw(random)))
        return Conversation(number, turns)

    def _turn(self, random: Random, number: int, turn: int) -> Turn:
        num_input = self.input_tokens.draw(random)
        num_output = self.output_tokens.draw(random)
        group = random.randrange(self.prefix_groups)
        num_shared = 0 if turn else int(num_input * self.prefix_share)
        pieces = (
            Piece(f"prefix {group}", num_shared),
            Piece(f"own {number} {turn}", num_input - num_shared),
        )
        return Turn(tuple(piece for piece in pieces if piece.num_tokens), num_output)


def first_requests(
    conversations: Iterable[Conversation], num_requests: int
) -> Iterator[Conversation]:
    """So many turns and no more: the last conversation may be cut short."""
    left = num_requests
    for conversation in conversations:
        if left <= 0:
            return
        turns = conversation.turns[:left]
        left -= len(turns)
        yield replace(conversation, turns=turns)
