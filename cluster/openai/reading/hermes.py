"""Tool calls as Hermes and Qwen write them:

<tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

from __future__ import annotations

import re

from cluster.openai.reading.marked import MarkedReader, State
from cluster.openai.reading.parts import Part

START, END = "<tool_call>", "</tool_call>"
# Some models close one object too many.
_SURPLUS = re.compile(r"[\s}]*")


class HermesReader(MarkedReader):
    marker = START

    def _read_marked(self, parts: list[Part]) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        if text.startswith("{"):
            self._begin_call()
        else:
            self._refuse(parts)
        return True

    def _read_after(self, parts: list[Part]) -> bool:
        text = _SURPLUS.sub("", self._text, count=1)
        if text != END and END.startswith(text):
            return False
        if text.startswith(END):
            self._text = text.removeprefix(END)
        self._state = State.CONTENT
        return True
