"""One tool call as Gemma's models write it: JSON's brackets, with keys as they are, and strings
between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from cluster.openai.reading.bare_values import BareValues
from cluster.openai.reading.parts import CallArguments, CallStart, Part, partial_at_end

_MAX_HEAD_CHARS = 256  # of a name or key, with what is around it
_OF_NAMES = r"""[^\s<>{}\[\]()"',\\]"""
_HEAD = re.compile(rf"\s*:?(?:call:)?({_OF_NAMES}*(?!:){_OF_NAMES})\s*\{{")
_BEFORE_HEAD = re.compile(rf"\s*{_OF_NAMES}*\s*")
_OF_KEYS = r"""[^:=,{}\[\]<>"'\n]"""
_CLOSING = {"{": "}", "[": "]"}
# Strings as others write them.
_IN_QUOTES = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*", re.DOTALL) for quote in "\"'"}
_NOT_OF_JSON = re.compile(r'\\.|["\x00-\x1f]', re.DOTALL)
_ANY_VALUES = BareValues(None)


class Notation(NamedTuple):
    """The marks around a call, and the one on either side of a string."""

    start: str
    end: str
    quote: str


class _State(Enum):
    NAME = auto()
    ITEM = auto()  # before a key, a value of an array, or a closing bracket
    VALUE = auto()
    STRING = auto()
    BARE = auto()
    CALL = auto()
    REFUSED = auto()


class GemmaCall:
    """It is a call from its name and first brace on. Strings are told on as they come, other
    values when they are whole. What is neither key nor value ends the call, with all that is open;
    only where the text ends within it, its JSON is left open."""

    def __init__(self, index: int, notation: Notation, tools: Mapping[str, Any]) -> None:
        """`tools`: parameters by name, to tell what bare values are."""
        self.rest: str | None = None  # what stands behind the call, once it has ended
        self._index = index
        self._notation = notation
        self._tools = tools
        quote = f"(?P<quote>{re.escape(notation.quote)}|[\"'])"
        quoted = rf"{quote}(?P<quoted>(?:(?!(?P=quote)).)*)"
        self._key_head = re.compile(
            rf"(?:{quoted}(?P=quote)|(?P<bare>{_OF_KEYS}+?))\s*[:=]", re.DOTALL
        )
        self._before_key = re.compile(rf"{quoted}(?:(?P=quote)\s*)?|{_OF_KEYS}+\s*", re.DOTALL)
        self._bare_end = re.compile(rf"[,\]}}]|{re.escape(notation.end)}")
        self._state = _State.NAME
        self._text = ""  # not read yet
        self._values = _ANY_VALUES
        self._open: list[str] = []  # what closes it, from the outside in
        self._between = ""  # what the next key or value is written behind
        self._key = ""  # of the outermost object
        self._quote = ""
        self._value: list[str] = []  # in pieces, of a bare one

    @property
    def text(self) -> str:
        """Of one that is not known to be a call; one that is none has all of it as `rest`."""
        return self._text if self._state is _State.NAME else ""

    @property
    def is_call(self) -> bool:
        return self._state not in (_State.NAME, _State.REFUSED)

    def push(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        arguments = ""
        if self._state is _State.NAME and (name := self._read_name()) is not None:
            parts.append(CallStart(self._index, name))
            arguments = self._opened("{")
        arguments += "".join(iter(self._read, None))
        return [*parts, CallArguments(self._index, arguments)] if arguments else parts

    def _read_name(self) -> str | None:
        head = _HEAD.match(self._text, 0, _MAX_HEAD_CHARS)
        if head is not None:
            self._text = self._text[head.end() :]
            self._values = BareValues(self._tools.get(head[1]))
            return head[1]
        if len(self._text) >= _MAX_HEAD_CHARS or not _BEFORE_HEAD.fullmatch(self._text):
            self._state, self.rest = _State.REFUSED, self._text
        return None

    def _read(self) -> str | None:
        """JSON of what comes next; None: it takes more text to say, or the call has ended."""
        match self._state:
            case _State.ITEM:
                return self._read_item()
            case _State.VALUE:
                return self._read_value()
            case _State.STRING:
                return self._read_string()
            case _State.BARE:
                return self._read_bare()
        return None

    def _read_item(self) -> str | None:
        text = self._text = self._text.lstrip(" \t\r\n,")
        if not text:
            return None
        if text[0] in "]}":
            self._text, self._between = text[1:], ", "
            closing = self._open.pop()
            if not self._open:
                self._state, self.rest = _State.CALL, self._text
            return closing
        return self._read_key() if self._open[-1] == "}" else self._read_place()

    def _read_key(self) -> str | None:
        text = self._text
        head = self._key_head.match(text, 0, _MAX_HEAD_CHARS)
        if head is not None:
            key = (head["quoted"] or head["bare"] or "").strip()
            if len(self._open) == 1:
                self._key = key
            self._text, self._state = text[head.end() :], _State.VALUE
            return f"{self._between}{json.dumps(key, ensure_ascii=False)}: "
        may_come = self._before_key.fullmatch(text) or self._notation.quote.startswith(text)
        return None if may_come and len(text) < _MAX_HEAD_CHARS else self._ended()

    def _read_place(self) -> str | None:
        """Of a value in an array."""
        end = self._notation.end
        if self._text.startswith(end):
            return self._ended()
        if end.startswith(self._text):
            return None
        self._state = _State.VALUE
        return self._between

    def _read_value(self) -> str | None:
        text = self._text = self._text.lstrip()
        quote = self._notation.quote
        if text != quote and quote.startswith(text):
            return None
        if text[0] in _CLOSING:
            self._text = text[1:]
            return self._opened(text[0])
        if not text.startswith((quote, *_IN_QUOTES)):
            self._state, self._value = _State.BARE, []
            return ""
        self._state, self._quote = _State.STRING, quote if text.startswith(quote) else text[0]
        self._text = text.removeprefix(self._quote)
        return '"'

    def _read_string(self) -> str | None:
        text, quote = self._text, self._quote
        if quote in _IN_QUOTES:
            match = _IN_QUOTES[quote].match(text)
            keep = match.end() if match else 0
            piece = _NOT_OF_JSON.sub(_as_json, text[:keep])
        else:
            at = text.find(quote)
            keep = at if at >= 0 else len(text) - partial_at_end(text, quote)
            piece = json.dumps(text[:keep], ensure_ascii=False)[1:-1]
        self._text = text[keep:]
        if not self._text.startswith(quote):
            return piece or None
        self._text = self._text.removeprefix(quote)
        self._state, self._between = _State.ITEM, ", "
        return piece + '"'

    def _read_bare(self) -> str | None:
        text = self._text
        end = self._bare_end.search(text)
        keep = end.start() if end else len(text) - partial_at_end(text, self._notation.end)
        self._value.append(text[:keep])
        self._text = text[keep:]
        if end is None:
            return None
        self._state, self._between = _State.ITEM, ", "
        values = self._values if len(self._open) == 1 else _ANY_VALUES
        return values.as_json(self._key, "".join(self._value).strip())

    def _opened(self, bracket: str) -> str:
        self._open.append(_CLOSING[bracket])
        self._state, self._between = _State.ITEM, ""
        return bracket

    def _ended(self) -> str:
        self._state, self.rest = _State.CALL, self._text
        return "".join(reversed(self._open))


def _as_json(found: re.Match[str]) -> str:
    """An escape, or a character that needs one."""
    text = found[0]
    if text == r"\'":
        return "'"
    is_escape = text[0] == "\\" and text[1] in '"\\/bfnrtu'
    return text if is_escape else json.dumps(text)[1:-1]
