"""Tool calls as Mistral's models write them, old and new:

[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}, the id and the mark of the arguments left out by some
"""

from __future__ import annotations

import re

from cluster.openai.reading.call_object import NamedCall
from cluster.openai.reading.marked import MarkedReader, State
from cluster.openai.reading.parts import Held, Part

MARKER, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(
    r"([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\s*([A-Za-z0-9_-]{1,64})\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
_MAX_NAME_CHARS = 256  # with the marks, up to the arguments


class MistralReader(MarkedReader):
    marker = MARKER

    def __init__(self) -> None:
        super().__init__()
        self._in_array = False

    def _read_marked(self, parts: list[Part]) -> bool:
        self._hold_start()
        if not self._text:
            return False
        if self._text.startswith("["):
            self._hold(1)
            self._in_array, self._state = True, State.AFTER
            return True
        head = self._text[:_MAX_NAME_CHARS]
        if "{" not in head and len(head) < _MAX_NAME_CHARS:
            return False
        name = _NAME.match(head)
        if name is None:
            self._refuse(parts)
        else:
            self._hold(name.end())
            self._call = NamedCall(self._num_calls, name[1], name[2])
            self._in_array, self._state = False, State.CALL
        return True

    def _read_after(self, parts: list[Part]) -> bool:
        if not self._in_array:
            self._state = State.CONTENT
            return True
        self._hold_start(" \t\r\n,")
        if not self._text:
            return False
        if self._text.startswith("{"):
            self._begin_call()
        elif self._text.startswith("]"):
            self._text, self._held, self._state = self._text[1:], Held(), State.CONTENT
        else:
            self._refuse(parts)
        return True
