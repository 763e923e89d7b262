"""Tool calls as OLMo 3 writes them, in Python:

<function_calls>
NAME(KEY=VALUE, ...)
NAME()
</function_calls>
"""

from __future__ import annotations

import re
from textwrap import dedent

from cluster.openai.reading.marked import MarkedReader, State
from cluster.openai.reading.parts import CallArguments, CallStart, Held, Part, partial_at_end
from cluster.openai.reading.python_call import python_calls

LINES_START, LINES_END = "<function_calls>", "</function_calls>"
_OUTSIDE = re.compile(rf"[\"']|{LINES_END}")
_IN_STRING = {quote: re.compile(rf"\\.|[{quote}\n]", re.DOTALL) for quote in "\"'"}


class Olmo3Reader(MarkedReader):
    """The calls come when the mark of their end has; if one of them is broken, all stay text. The
    mark may be in a string, and no string goes on behind a line's end."""

    marker = LINES_START

    def __init__(self) -> None:
        super().__init__()
        self._code: list[str] = []  # in pieces, behind the mark
        self._quote = ""  # of the string that the code ends in

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._state is State.MARKED:
            self._code.append(self._text)
            self._text = ""
            self._read_code("", parts)
        return parts + super().finish()

    def _read_marked(self, parts: list[Part]) -> bool:
        text, at = self._text, 0
        while found := self._next_sign().search(text, at):
            at = found.end()
            if found[0] == LINES_END:
                self._code.append(text[: found.start()])
                self._text = text[at:]
                self._read_code(LINES_END, parts)
                return True
            if not self._quote:
                self._quote = found[0]
            elif not found[0].startswith("\\"):
                self._quote = ""
        if self._quote:
            keep = len(text) - (at < len(text) and text.endswith("\\"))
        else:
            keep = len(text) - partial_at_end(text, LINES_END)
        self._code.append(text[:keep])
        self._text = text[keep:]
        return False

    def _next_sign(self) -> re.Pattern[str]:
        return _IN_STRING[self._quote] if self._quote else _OUTSIDE

    def _read_code(self, end: str, parts: list[Part]) -> None:
        code = "".join(self._code)
        self._code, self._quote = [], ""
        calls = python_calls(dedent(code).strip(), in_lines=True)
        if not calls:
            self._held.add(code + end)
            self._refuse(parts)
            return
        self._held, self._state = Held(), State.CONTENT
        for call in calls:
            parts += [
                CallStart(self._num_calls, call.name),
                CallArguments(self._num_calls, call.arguments),
            ]
            self._num_calls += 1

    def _read_after(self, parts: list[Part]) -> bool:
        self._state = State.CONTENT
        return True
