"""Tool calls as Llama 3 writes them: an answer that is a JSON object with the name of a tool, or
several with semicolons between them; after <|python_tag|> also `tool.call(query="...")`."""

from __future__ import annotations

import re
from collections.abc import Collection

from cluster.openai.reading.marked import MarkedReader, State
from cluster.openai.reading.parts import CallArguments, CallStart, Held, Part
from cluster.openai.reading.python_call import PythonCall, python_calls

PYTHON_TAG = "<|python_tag|>"
_BUILT_IN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\.call(\(.*\))\s*", re.DOTALL)


class Llama3Reader(MarkedReader):
    """Without a mark, only an object that names a tool of the request is a call: answers may be
    JSON for other reasons."""

    marker = PYTHON_TAG

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(State.AFTER)
        self._tools = frozenset(tools)
        self._code: list[str] = []  # in pieces, behind a mark

    def finish(self) -> list[Part]:
        if self._state is State.MARKED:
            self._text = "".join(self._code)
            call = _built_in_call(self._text)
            if call is not None:
                name, arguments = call
                index = self._num_calls
                return [CallStart(index, name), CallArguments(index, arguments)]
        if self._state is State.AFTER and not self._num_calls:
            self._state = State.CONTENT  # nothing but white space
        return super().finish()

    def _read_marked(self, parts: list[Part]) -> bool:
        if not self._code:
            self._hold_start()
            if self._text.startswith("{"):
                self._begin_call()
                return True
        if self._text:  # code, which goes on to the answer's end
            self._code.append(self._text)
            self._text = ""
        return False

    def _read_after(self, parts: list[Part]) -> bool:
        """Also where an answer begins."""
        self._hold_start(" \t\r\n;" if self._num_calls else None)
        if not self._text:
            return False
        if self._text.startswith("{"):
            if self._num_calls:
                self._held = Held()
            self._begin_call(self._tools.__contains__)
        else:
            self._refuse(parts)
        return True


def _built_in_call(code: str) -> PythonCall | None:
    match = _BUILT_IN.fullmatch(code)
    calls = python_calls(match[1] + match[2]) if match else None
    return calls[0] if calls else None
