"""Tool calls as Granite 3 writes them, some with a mark like that of others:

<|tool_call|>[{"name": ..., "arguments": {...}}, ...]
"""

from __future__ import annotations

from cluster.openai.reading.hermes import START
from cluster.openai.reading.mistral import MistralReader
from cluster.openai.reading.parts import Part

MARK = "<|tool_call|>"


class GraniteReader(MistralReader):
    marker, unmarked = MARK, START

    def _read_marked(self, parts: list[Part]) -> bool:
        self._hold_start()
        if not self._text or self._text.startswith("["):
            return super()._read_marked(parts)
        self._refuse(parts)
        return True
