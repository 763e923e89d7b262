"""Tool calls between tags, without any JSON but in their values, as Qwen 3 Coder, Seed-OSS, MiniMax
M2 and GLM 4.5 write them, the first without its mark at times:

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>

<seed:tool_call>
<function=NAME>
<parameter=KEY>VALUE</parameter>
</function>
</seed:tool_call>

<minimax:tool_call>
<invoke name="NAME">
<parameter name="KEY">VALUE</parameter>
</invoke>
</minimax:tool_call>

<tool_call>NAME
<arg_key>KEY</arg_key>
<arg_value>VALUE</arg_value>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cluster.openai.reading.hermes import END, START, HermesReader
from cluster.openai.reading.marked import State
from cluster.openai.reading.parts import Part
from cluster.openai.reading.tagged_call import TaggedCall, Tags

ARGUMENT_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# A tag, and as much as may be of the one behind it.
_TAG_AND_MORE = re.compile(r"\s*(?:<[^<>]*(?:>\s*(?:<[^<>]*)?)?)?")
QWEN3_CODER = Tags(
    start="<function=",
    name=re.compile(r"\s*<function=([^<>\s]+)>\s*(?=<parameter=|</function>)"),
    before_name=_TAG_AND_MORE,
    key_start="<parameter=",
    key=re.compile(r"<parameter=([^<>]+)>(?:\n|(?=[^\n]))"),
    value_end="</parameter>",
    end="</function>",
    marks=(START, END),
    line="\n",
)
SEED_OSS = QWEN3_CODER._replace(
    key=re.compile(r"<parameter=([^<>]+)>"),
    line="",
    marks=("<seed:tool_call>", "</seed:tool_call>"),
)
MINIMAX_M2 = Tags(
    start='<invoke name="',
    name=re.compile(r'\s*<invoke name="([^<>"\s]+)">\s*(?=<parameter name="|</invoke>)'),
    before_name=_TAG_AND_MORE,
    key_start='<parameter name="',
    key=re.compile(r'<parameter name="([^<>"]+)">'),
    value_end="</parameter>",
    end="</invoke>",
    marks=("<minimax:tool_call>", "</minimax:tool_call>"),
)
GLM45 = Tags(
    name=re.compile(r"\s*([^<>\s]+)\s*(?=<arg_key>|</tool_call>)"),
    before_name=re.compile(r"\s*[^<>\s]*\s*(?:<[^<>]*)?"),
    key_start="<arg_key>",
    key=re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>"),
    value_end="</arg_value>",
    end=END,
    marks=(START, END),
)


class TaggedReader(HermesReader):
    def __init__(self, tags: Tags, tools: Mapping[str, Any]) -> None:
        super().__init__()
        self.marker, self.end = tags.marks
        self.unmarked = tags.start
        self._tags = tags
        self._tools = tools

    def _read_marked(self, parts: list[Part]) -> bool:
        begun = self._found if self._found == self.unmarked else ""
        self._call = TaggedCall(self._num_calls, self._tags, self._tools, begun)
        self._state = State.CALL
        return True
