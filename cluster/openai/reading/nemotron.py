"""Tool calls as NVIDIA's Nemotron models write them:

<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>
"""

from __future__ import annotations

from cluster.openai.reading.granite import GraniteReader
from cluster.openai.reading.marked import State
from cluster.openai.reading.parts import Held, Part

LIST_START, LIST_END = "<TOOLCALL>", "</TOOLCALL>"


class NemotronReader(GraniteReader):
    """The mark of the end may be missing."""

    marker, unmarked, end = LIST_START, "", LIST_END

    def _read_after(self, parts: list[Part]) -> bool:
        if self._in_array:
            is_end = self._text.lstrip(" \t\r\n,").startswith("]")
            is_read = super()._read_after(parts)
            if is_end:
                self._in_array, self._state = False, State.AFTER
            return is_read
        self._hold_start()
        if self._text != self.end and self.end.startswith(self._text):
            return False
        if self._text.startswith(self.end):
            self._text, self._held = self._text.removeprefix(self.end), Held()
            self._state = State.CONTENT
        else:
            self._refuse(parts)
        return True
