"""Tool calls as Phi-4-mini writes them, by its own tokens or by the word that other templates ask
for:

<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>
<|tool_call|>{"name": ..., "arguments": {...}}<|/tool_call|>
functools[{"name": ..., "arguments": {...}}, ...]
"""

from __future__ import annotations

from cluster.openai.reading.granite import MARK
from cluster.openai.reading.nemotron import NemotronReader
from cluster.openai.reading.parts import Part

MARK_END, WORD = "<|/tool_call|>", "functools["


class Phi4MiniReader(NemotronReader):
    """The word begins a list that is not empty; it may stand in any text."""

    marker, unmarked, end = MARK, WORD, MARK_END

    def _read_marked(self, parts: list[Part]) -> bool:
        self._hold_start()
        if self._text.startswith("{"):
            self._in_array = self._found == self.unmarked
            self._begin_call()
            return True
        if self._text and self._found == self.unmarked:
            self._refuse(parts)
            return True
        return super()._read_marked(parts)
