"""Tokens to text as they come: every piece is whole characters, and no piece is taken back."""

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from engine.text.pieces import REPLACEMENT, Pieces

# An incomplete UTF-8 character has at most this many bytes.
_MAX_PENDING = 3
# Tokens that a decoder may look back at; more never changed what follows.
_CONTEXT_TOKENS = 6
# Tokens that may pass without whole text before what there is gets shown.
_MAX_HELD_TOKENS = 16


class Decoder(Protocol):
    """The text of one sequence of tokens; single use."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        ...

    def finish(self) -> str:
        """What is left: replacement characters where the tokens end inside a character."""
        ...


def decoder_of(pieces: Pieces, context: Sequence[int] = ()) -> Decoder:
    """`context` are the tokens before the first one pushed: the text goes on where they end."""
    if pieces.table is None:
        return WindowDecoder(pieces, context)
    return ByteDecoder(pieces, context)


class ByteDecoder:
    """Joins the tokens' bytes and reads them as UTF-8.

    Equal to the tokenizer's own decoding of everything at once, with one exception: where
    fallback bytes turn out invalid, the valid characters among them stay (they were shown).
    """

    def __init__(self, pieces: Pieces, context: Sequence[int]) -> None:
        assert pieces.table is not None
        self._pieces = pieces
        self._table = pieces.table
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=pieces.utf8_errors)
        self._strip_left = pieces.strip_left
        self._started = pieces.first is None and not pieces.strip_left
        self._follow(context)

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._started:
            return self._start(token_ids)
        table = self._table
        if len(token_ids) == 1:
            return self._utf8.decode(table[token_ids[0]])
        return self._utf8.decode(b"".join([table[i] for i in token_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _follow(self, context: Sequence[int]) -> None:
        """Takes over a character that the context leaves unfinished."""
        tail = b""
        for token_id in reversed(context):
            tail = self._table[token_id] + tail
            if len(tail) >= _MAX_PENDING:
                break
        self._started = self._started or bool(tail)
        self._utf8.decode(tail[-_MAX_PENDING:])

    def _start(self, token_ids: Sequence[int]) -> str:
        """At the start of a text the marks of a word's beginning are not spaces."""
        joined = b""
        for token_id in token_ids:
            if self._started:
                joined += self._table[token_id]
            elif self._pieces.first is not None:
                joined += self._pieces.first[token_id]
                self._started = self._pieces.shows(token_id)
            else:
                joined += self._stripped(self._table[token_id])
        return self._utf8.decode(joined)

    def _stripped(self, piece: bytes) -> bytes:
        rest = piece
        while self._strip_left and rest.startswith(b" "):
            rest = rest[1:]
            self._strip_left -= 1
        self._started = bool(rest) or not self._strip_left
        return rest


class WindowDecoder:
    """For tokens whose text depends on their neighbours: decodes the last few together, and
    shows what a token adds to the text of those before it."""

    def __init__(self, pieces: Pieces, context: Sequence[int]) -> None:
        self._pieces = pieces
        shown = filter(pieces.shows, reversed(context))
        self._window = list(islice(shown, _CONTEXT_TOKENS))[::-1]
        self._num_shown = len(self._window)  # tokens of the window whose text is out

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        shown = self._decode(self._window[: self._num_shown])
        return self._decode(self._window)[len(shown) :]

    def _push_one(self, token_id: int) -> str:
        if not self._pieces.shows(token_id):
            return ""
        self._window.append(token_id)
        shown = self._decode(self._window[: self._num_shown])
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_shown
        whole = not text.endswith(REPLACEMENT) and len(text) > len(shown)
        if not whole and num_held < _MAX_HELD_TOKENS:
            return ""
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._num_shown = len(self._window)
        return text[len(shown) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._pieces.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
