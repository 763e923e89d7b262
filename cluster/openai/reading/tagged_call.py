"""One tool call between tags: a name, then keys and values, all as bare text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from cluster.openai.reading.bare_values import BareValues
from cluster.openai.reading.parts import CallArguments, CallStart, Held, Part, partial_at_end

_MAX_HEAD_CHARS = 256  # of a name or key, with its tags


class Tags(NamedTuple):
    """`name` and `key` match up to what follows them, with their text as group 1."""

    name: re.Pattern[str]
    before_name: re.Pattern[str]  # matches whatever may become `name`
    key_start: str
    key: re.Pattern[str]
    value_end: str
    end: str  # behind the last argument
    marks: tuple[str, str]  # around one call, or several that have a `start`
    line: str = ""  # break before `value_end` that is not the value's
    start: str = ""  # of `name`, where no mark need be before it


class _State(Enum):
    NAME = auto()
    KEY = auto()
    STRING = auto()
    VALUE = auto()
    CALL = auto()
    REFUSED = auto()


class TaggedCall:
    """It is a call from its name and the tag behind it on. Strings are told on as they come,
    other values when they are whole. Whatever is no argument ends the call; only where the text
    ends within it, its JSON is left open."""

    def __init__(self, index: int, tags: Tags, tools: Mapping[str, Any], begun: str = "") -> None:
        """`tools`: parameters by name, to tell what values are. `begun`: what was read of it
        already, without a mark before it; then only a tool's name makes it a call."""
        self.rest: str | None = None  # what stands behind the call, once it has ended
        self._index = index
        self._tags = tags
        self._tools = tools
        self._state = _State.NAME
        self._begun = begun
        self._space = Held()  # before the text, where a key may follow
        self._text = begun  # not read yet
        self._values = BareValues(None)
        self._key = ""
        self._value: list[str] = []  # in pieces, of one that is no string
        self._opening = "{"  # what the next argument is written behind

    @property
    def text(self) -> str:
        """Of one that is not known to be a call, behind `begun`; one that is none has all of it
        as `rest`."""
        return self._text[len(self._begun) :] if self._state is _State.NAME else ""

    @property
    def is_call(self) -> bool:
        return self._state not in (_State.NAME, _State.REFUSED)

    def push(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        if self._state is _State.NAME and (name := self._read_name()) is not None:
            parts.append(CallStart(self._index, name))
        arguments = self._read_arguments() if self.is_call else ""
        return [*parts, CallArguments(self._index, arguments)] if arguments else parts

    def _read_name(self) -> str | None:
        name = self._tags.name.match(self._text, 0, _MAX_HEAD_CHARS)
        if name is not None and (not self._begun or name[1] in self._tools):
            self._text = self._text[name.end() :]
            self._values = BareValues(self._tools.get(name[1]))
            self._state = _State.KEY
            return name[1]
        may_come = name is None and len(self._text) < _MAX_HEAD_CHARS
        if not (may_come and self._tags.before_name.fullmatch(self._text)):
            self._state, self.rest = _State.REFUSED, self._text[len(self._begun) :]
        return None

    def _read_arguments(self) -> str:
        """JSON of what is new."""
        pieces: list[str] = []
        while True:
            match self._state:
                case _State.KEY:
                    piece = self._read_key()
                case _State.STRING | _State.VALUE:
                    piece = self._read_value()
                case _:
                    piece = None
            if piece is None:
                return "".join(pieces)
            pieces.append(piece)

    def _read_key(self) -> str | None:
        """None: it takes more text to say."""
        tags = self._tags
        text = self._text = self._space.add_start(self._text)
        if tags.key_start.startswith(text):
            return None
        if text.startswith(tags.key_start):
            key = tags.key.match(text, 0, _MAX_HEAD_CHARS)
            if key is not None:
                self._key, self._text = key[1], text[key.end() :]
                self._space = Held()
                return self._begin_value()
            if len(text) < _MAX_HEAD_CHARS:
                return None
        elif tags.end.startswith(text) and text != tags.end:
            return None
        elif text.startswith(tags.end):
            self._text, self._space = text.removeprefix(tags.end), Held()
        self._state, self.rest = _State.CALL, self._space.take() + self._text
        return "{}" if self._opening == "{" else "}"

    def _begin_value(self) -> str:
        if not self._values.is_string(self._key):
            self._state, self._value = _State.VALUE, []
            return ""
        self._state = _State.STRING
        return self._key_as_json() + '"'

    def _key_as_json(self) -> str:
        opening, self._opening = self._opening, ", "
        return f"{opening}{json.dumps(self._key, ensure_ascii=False)}: "

    def _read_value(self) -> str | None:
        """None: all that is here has been read."""
        is_string = self._state is _State.STRING
        value, has_ended = self._take_value()
        if has_ended:
            self._state = _State.KEY
        if is_string:
            return json.dumps(value, ensure_ascii=False)[1:-1] + '"' * has_ended or None
        self._value.append(value)
        if not has_ended:
            return None
        return self._key_as_json() + self._values.as_json(self._key, "".join(self._value))

    def _take_value(self) -> tuple[str, bool]:
        """What is known to be the value's, and whether that is its end."""
        text, end = self._text, self._tags.value_end
        at = text.find(end)
        if at >= 0:
            self._text = text[at + len(end) :]
            return text[:at].removesuffix(self._tags.line), True
        keep = partial_at_end(text, end)
        if self._tags.line:
            keep = max(keep, partial_at_end(text, self._tags.line + end))
        self._text = text[len(text) - keep :]
        return text[: len(text) - keep], False
