"""What each token adds to a text, in bytes.

Nearly every tokenizer spells its tokens one by one: byte-level BPE through a table of stand-in
characters, SentencePiece's descendants with `▁` for a space and `<0xE4>` for a byte. For those
the text is the concatenated bytes read as UTF-8, so a stream of tokens decodes in O(1) each.
Decoders that look at neighbours (WordPiece, say) have no such table.
"""

import codecs
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Spell = Callable[[str], bytes]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Python's "replace" writes one replacement for each broken character, as byte-level decoders do.
REPLACE_EACH_BYTE = "kvrelay.replace_each_byte"


class PieceTable(dict[int, bytes]):
    """Bytes by token id, filled as tokens are met; nothing for ids without a token."""

    def __init__(self, tokenizer: Any, spell: Spell, hidden: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._tokenizer = tokenizer
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        piece = b"" if token is None else self._spell(token)
        self[token_id] = piece
        return piece


@dataclass(frozen=True)
class Pieces:
    """How a tokenizer spells. `table` is None where a token's text depends on its neighbours.

    At the very start of a text `first` spells the first token that shows (where it differs),
    and up to `strip_left` spaces are dropped.
    """

    tokenizer: Any
    hidden: frozenset[int]  # ids that show nothing: special tokens that are skipped
    table: PieceTable | None
    first: PieceTable | None = None
    strip_left: int = 0
    utf8_errors: str = "replace"

    def shows(self, token_id: int) -> bool:
        return token_id not in self.hidden and self.tokenizer.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """One token by itself, its leading space included."""
        if self.table is not None:
            return self.table[token_id]
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return b"" if token_id in self.hidden else text.encode()


def pieces_of(tokenizer: Any, *, hidden: frozenset[int]) -> Pieces:
    """From a `tokenizers.Tokenizer`, by its decoder's description."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return Pieces(tokenizer, hidden, PieceTable(tokenizer, spell_byte_level, hidden))
    if kinds == ["Metaspace"]:
        return _metaspace(tokenizer, hidden, steps[0])
    return _byte_fallback(tokenizer, hidden, steps) or Pieces(tokenizer, hidden, None)


def spell_byte_level(token: str) -> bytes:
    """Each character stands for a byte; an added token with any other is spelt as it is."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _metaspace(tokenizer: Any, hidden: frozenset[int], step: Mapping[str, Any]) -> Pieces:
    mark = step["replacement"]
    table = PieceTable(tokenizer, lambda token: token.replace(mark, " ").encode(), hidden)
    if step.get("prepend_scheme") == "never":
        return Pieces(tokenizer, hidden, table)
    first = PieceTable(tokenizer, lambda token: token.replace(mark, "").encode(), hidden)
    return Pieces(tokenizer, hidden, table, first)


def _byte_fallback(
    tokenizer: Any, hidden: frozenset[int], steps: list[dict[str, Any]]
) -> Pieces | None:
    """Replace..., ByteFallback, Fuse, Strip: what Llama 2, Gemma and their kin are made of."""
    replacements: list[tuple[str, str]] = []
    rest = list(steps)
    while rest and rest[0].get("type") == "Replace":
        step = rest.pop(0)
        if "String" not in step["pattern"]:
            return None
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step.get("type") for step in rest]
    if kinds[:2] != ["ByteFallback", "Fuse"]:
        return None
    strip_left = 0
    if kinds[2:] == ["Strip"]:
        strip = rest[2]
        if strip["content"] != " " or strip["stop"]:
            return None
        strip_left = strip["start"]
    elif kinds[2:]:
        return None

    def spell(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        return _fallback_byte(token) or token.encode()

    table = PieceTable(tokenizer, spell, hidden)
    return Pieces(tokenizer, hidden, table, strip_left=strip_left, utf8_errors=REPLACE_EACH_BYTE)


def _fallback_byte(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Bytes that print in Latin-1 stand for themselves, the others for 256, 257, ... in order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printing)]
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)
_BYTE_OF = _byte_level_alphabet()
