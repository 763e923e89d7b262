"""Tool calls as Hermes and Qwen write them:

<tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

from __future__ import annotations

import re

from cluster.openai.reading.marked import MarkedReader, State
from cluster.openai.reading.parts import Held, Part

START, END = "<tool_call>", "</tool_call>"
# Some models close one object too many.
_SURPLUS = re.compile(r"[\s}]*")


class HermesReader(MarkedReader):
    marker, end = START, END

    def _read_marked(self, parts: list[Part]) -> bool:
        self._hold_start()
        if not self._text:
            return False
        if self._text.startswith("{"):
            self._begin_call()
        else:
            self._refuse(parts)
        return True

    def _read_after(self, parts: list[Part]) -> bool:
        surplus = _SURPLUS.match(self._text)
        self._hold(surplus.end() if surplus else 0)
        if self._text != self.end and self.end.startswith(self._text):
            return False
        if self._text.startswith(self.end):
            self._text = self._text.removeprefix(self.end)
            self._held, self._state = Held(), State.CONTENT
        else:
            self._refuse(parts)
        return True
