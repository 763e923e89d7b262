"""Tool calls in a section of their own, each with a head before its arguments, as DeepSeek's V3, R1
and V3.1 and Kimi K2 write them:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cluster.openai.reading.call_object import NamedCall
from cluster.openai.reading.marked import MarkedReader, State
from cluster.openai.reading.parts import Held, Part

_MAX_HEAD_CHARS = 256
_FENCE = "```"


class Section(NamedTuple):
    """`head` matches up to the arguments; its groups are `name` and maybe `number`, with which what
    is up to there is an id."""

    start: str
    call: str
    separator: str
    call_end: str
    end: str
    head: re.Pattern[str]

    @property
    def marks(self) -> tuple[str, ...]:
        """Without which no call is known: those of the ends may be hidden."""
        return self.start, self.call, self.separator


DEEPSEEK_V3 = Section(
    start="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    head=re.compile(
        r"(?:function<｜tool▁sep｜>(?P<fenced>[^\s<>`{}]+)\s*```(?:json)?"
        r"|(?P<name>[^\s<>`{}]+)\s*<｜tool▁sep｜>)\s*(?=\{)"
    ),
)
KIMI_K2 = Section(
    start="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    head=re.compile(
        r"(?:functions\.)?(?P<name>[^\s<>`{}:]+)(?P<number>:\d+)?"
        r"\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
)


class SectionReader(MarkedReader):
    """A call may lack the mark of the section, and the section its end."""

    def __init__(self, section: Section) -> None:
        super().__init__()
        self.marker, self.unmarked = section.start, section.call
        self._section = section
        self._closing: tuple[str, ...] = ()  # what may stand behind the call that was read

    def _read_marked(self, parts: list[Part]) -> bool:
        self._hold_start()
        call = self._section.call
        if self._found != call:
            if self._text != call and call.startswith(self._text):
                return False
            if self._text.startswith(call):
                self._hold(len(call))
                self._found = call
            else:
                self._refuse(parts)
            return True
        head = self._text[:_MAX_HEAD_CHARS]
        if "{" not in head and len(head) < _MAX_HEAD_CHARS:
            return False
        match = self._section.head.match(head)
        if match is None:
            self._refuse(parts)
            return True
        self._hold(match.end())
        said = match.groupdict()
        fenced = said.get("fenced")
        call_id = head[: match.end("number")] if said.get("number") else None
        self._call = NamedCall(self._num_calls, fenced or said["name"], call_id)
        ends = (self._section.call_end, self._section.end)
        self._closing = (_FENCE, *ends) if fenced else ends
        self._state = State.CALL
        return True

    def _read_after(self, parts: list[Part]) -> bool:
        self._hold_start()
        call = self._section.call
        expected = (*self._closing, call)
        mark = next((one for one in expected if self._text.startswith(one)), None)
        if mark is None:
            if any(one.startswith(self._text) for one in expected):
                return False
            self._refuse(parts)
            return True
        self._held = Held()
        if mark == call:
            self._hold(len(call))
            self._found, self._state = call, State.MARKED
            return True
        self._text = self._text.removeprefix(mark)
        if mark == self._section.end:
            self._state = State.CONTENT
        else:
            self._closing = self._closing[self._closing.index(mark) + 1 :]
        return True
