"""The grammar that an answer must fit, and what may stand before that, as they travel with a
request: plain data."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from engine.errors import RequestError

# With the compiler's own limits this bounds what compiling takes of stack and memory.
MAX_GRAMMAR_BYTES = 64 << 10


class GrammarKind(StrEnum):
    """How the text is to be read; the names are those of the wire."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON array of the texts that the answer may be
    GRAMMAR = "grammar"  # Lark, or GBNF


@dataclass(frozen=True, slots=True)
class Grammar:
    """Whether it can be compiled is not known before that is done."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, GrammarKind) or not isinstance(self.text, str):
            raise RequestError("grammar", "must be a kind and a text")
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError:
            raise RequestError("grammar", "must be a text of whole characters") from None
        if not 0 < num_bytes <= MAX_GRAMMAR_BYTES:
            raise RequestError(
                "grammar", f"{num_bytes} bytes, must be 1 to {MAX_GRAMMAR_BYTES}{_as(self.kind)}"
            )


Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Tokens before what must fit: those between which a model reasons first, in any words, and
    `then`, or those which stand `instead` of all that. `exits` may come in place of `then`, and
    need nothing behind them that fits."""

    end: int
    start: Tokens = ()  # none: its prompt has begun it
    then: Tokens = ()
    instead: Tokens = ()
    exits: tuple[Tokens, ...] = ()

    @property
    def marks(self) -> tuple[Tokens, ...]:
        return self.start, self.then, self.instead

    @property
    def token_ids(self) -> Tokens:
        return (self.end, *chain(*self.marks, *self.exits))


def _as(kind: GrammarKind) -> str:
    return " as compact text" if kind is GrammarKind.JSON_SCHEMA else ""


ANY_JSON_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
