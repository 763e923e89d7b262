"""Tool calls as Hunyuan A13B and Apriel 1.5 write them:

<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>
"""

from __future__ import annotations

from cluster.openai.reading.nemotron import NemotronReader

CALLS_START, CALLS_END = "<tool_calls>", "</tool_calls>"


class HunyuanReader(NemotronReader):
    marker, end = CALLS_START, CALLS_END
