"""Tool calls as Granite 3 writes them, some with a mark like that of others:

<|tool_call|>[{"name": ..., "arguments": {...}}, ...]
"""

from __future__ import annotations

from cluster.openai.reading.hermes import START
from cluster.openai.reading.mistral import MistralReader

MARK = "<|tool_call|>"


class GraniteReader(MistralReader):
    marker, unmarked = MARK, START
