"""One tool call as a JSON object: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from cluster.openai.reading.parts import CallArguments, CallStart, Part

_IN_STRING, _OUTSIDE = re.compile(r'["\\]'), re.compile(r'[{}\[\]"]')
# Up to the arguments, in the order that models are taught.
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEAD_CHARS = 4096


class ObjectEnd:
    """Looks for where a JSON object ends, in pieces of its text, from its first brace."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Characters of this piece up to the end, the last brace included."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while match := (_IN_STRING if self._in_string else _OUTSIDE).search(text, at):
            at = match.end()
            match match.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None


class ArgumentsReader:
    """A call's arguments, told on as they come."""

    def __init__(self, index: int) -> None:
        self.rest: str | None = None  # what stands behind them, once they have ended
        self._index = index
        self._end = ObjectEnd()

    def push(self, text: str) -> list[Part]:
        end = self._end.find(text)
        if end is not None:
            text, self.rest = text[:end], text[end:]
        return [CallArguments(self._index, text)] if text else []


class NamedCall:
    """Arguments of a call whose name is known."""

    is_call = True
    text = ""

    def __init__(self, index: int, name: str, call_id: str | None) -> None:
        self._start: list[Part] = [CallStart(index, name, call_id)]
        self._arguments = ArgumentsReader(index)

    @property
    def rest(self) -> str | None:
        return self._arguments.rest

    def push(self, text: str) -> list[Part]:
        start, self._start = self._start, []
        return start + self._arguments.push(text)


class _State(Enum):
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    TAIL_FIELDS = auto()
    CALL = auto()
    REFUSED = auto()


class CallObject:
    """Its arguments are told on as soon as its name is known. An object that is in another
    order is read as a whole; one that is no call is refused as a whole."""

    def __init__(self, index: int, is_tool: Callable[[str], bool] | None = None) -> None:
        """`is_tool` refuses names; without it any will do."""
        self.rest: str | None = None  # what stands behind the object, once it has ended
        self._index = index
        self._is_tool = is_tool or (lambda name: True)
        self._state = _State.HEAD
        self._pieces: list[str] = []  # of `text`
        self._num_chars = 0
        self._end = ObjectEnd()
        self._arguments = ArgumentsReader(index)

    @property
    def text(self) -> str:
        """Of an object that is not known to be a call."""
        return "".join(self._pieces)

    @property
    def is_call(self) -> bool:
        return self._state not in (_State.HEAD, _State.REFUSED)

    def push(self, text: str) -> list[Part]:
        match self._state:
            case _State.HEAD:
                return self._read_head(text)
            case _State.ARGUMENTS:
                return self._read_arguments(text)
            case _State.TAIL | _State.TAIL_FIELDS:
                self._read_tail(text)
        return []

    def _read_head(self, text: str) -> list[Part]:
        tried = self._num_chars >= _MAX_HEAD_CHARS
        self._pieces.append(text)
        self._num_chars += len(text)
        if not tried:
            begun = self.text
            head = _HEAD.match(begun, 0, _MAX_HEAD_CHARS)
            name = _decoded(head[1]) if head else None
            if head and isinstance(name, str) and self._is_tool(name):
                self._state = _State.ARGUMENTS
                return [CallStart(self._index, name), *self._read_arguments(begun[head.end() :])]
        end = self._end.find(text)
        if end is None:
            return []
        self._pieces[-1], self.rest = text[:end], text[end:]
        call = _call_of(_decoded(self.text))
        if call is None or not self._is_tool(call[0]):
            self._state = _State.REFUSED
            return []
        self._state = _State.CALL
        return [CallStart(self._index, call[0]), CallArguments(self._index, call[1])]

    def _read_arguments(self, text: str) -> list[Part]:
        parts = self._arguments.push(text)
        if self._arguments.rest is not None:
            self._state = _State.TAIL
            self._read_tail(self._arguments.rest)
        return parts

    def _read_tail(self, text: str) -> None:
        """To the closing brace, which some models forget."""
        if self._state is _State.TAIL:
            text = text.lstrip()
            if not text:
                return
            if text[0] not in ",}":
                self._state, self.rest = _State.CALL, text
                return
            self._state, self._end = _State.TAIL_FIELDS, ObjectEnd(depth=1)
        end = self._end.find(text)
        if end is not None:
            self._state, self.rest = _State.CALL, text[end:]


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any) -> tuple[str, str] | None:
    """A name and arguments in JSON."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return value["name"], arguments
    return value["name"], json.dumps({} if arguments is None else arguments, ensure_ascii=False)
