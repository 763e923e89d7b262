"""Tool calls as Gemma 4 and FunctionGemma write them:

<|tool_call>call:NAME{key:<|"|>value<|"|>,other:[1,{inner:true}]}<tool_call|>

<start_function_call>call:NAME{key:<escape>value<escape>}<end_function_call>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.openai.reading.gemma_call import GemmaCall, Notation
from cluster.openai.reading.hermes import HermesReader
from cluster.openai.reading.marked import State
from cluster.openai.reading.parts import Part

GEMMA4 = Notation(start="<|tool_call>", end="<tool_call|>", quote='<|"|>')
FUNCTION_GEMMA = Notation("<start_function_call>", "<end_function_call>", "<escape>")


class GemmaReader(HermesReader):
    def __init__(self, notation: Notation, tools: Mapping[str, Any]) -> None:
        super().__init__()
        self.marker, self.end = notation.start, notation.end
        self._notation = notation
        self._tools = tools

    def _read_marked(self, parts: list[Part]) -> bool:
        self._call = GemmaCall(self._num_calls, self._notation, self._tools)
        self._state = State.CALL
        return True
