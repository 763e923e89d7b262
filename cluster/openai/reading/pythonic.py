"""Tool calls as Llama 3.2 and 4 write them where they are asked for Python: an answer that is a
list of calls, [f(a=1, b="x"), g()]."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto

from cluster.openai.reading.parts import CallArguments, CallStart, Content, Part
from cluster.openai.reading.python_call import python_calls

_HEAD = re.compile(r"\s*\[\s*([A-Za-z_][A-Za-z0-9_.]*)\s*\(")
_BEFORE_HEAD = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][A-Za-z0-9_.]*\s*)?)?")
_MAX_HEAD_CHARS = 256


class _State(Enum):
    HEAD = auto()
    CALLS = auto()
    CONTENT = auto()


class PythonicReader:
    """There is no mark: an answer that begins with a call of one of the request's tools is held
    to its end, and is calls if all of it is."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = frozenset(tools)
        self._state = _State.HEAD
        self._held: list[str] = []

    def push(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._state is _State.CONTENT:
            return [Content(text)]
        self._held.append(text)
        if self._state is _State.HEAD:
            self._state = self._state_by_head("".join(self._held))
        return self._take_content() if self._state is _State.CONTENT else []

    def finish(self) -> list[Part]:
        calls = python_calls("".join(self._held).strip()) if self._state is _State.CALLS else None
        if calls is None or any(call.name not in self._tools for call in calls):
            return self._take_content()
        parts: list[Part] = []
        for index, call in enumerate(calls):
            parts += [CallStart(index, call.name), CallArguments(index, call.arguments)]
        return parts

    def _state_by_head(self, text: str) -> _State:
        head = _HEAD.match(text, 0, _MAX_HEAD_CHARS)
        if head is not None:
            return _State.CALLS if head[1] in self._tools else _State.CONTENT
        waits = len(text) < _MAX_HEAD_CHARS and _BEFORE_HEAD.fullmatch(text)
        return _State.HEAD if waits else _State.CONTENT

    def _take_content(self) -> list[Part]:
        text, self._held = "".join(self._held), []
        return [Content(text)] if text else []
