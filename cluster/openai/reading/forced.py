"""Answers that a grammar makes calls of, whatever the model's own way of writing them is."""

from __future__ import annotations

from cluster.openai.reading.marked import State
from cluster.openai.reading.mistral import MistralReader
from cluster.openai.reading.parts import CallArguments, CallStart, Part


class NamedReader:
    """The answer is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._start: list[Part] = [CallStart(0, name)]

    def push(self, text: str) -> list[Part]:
        text = text.lstrip() if self._start else text
        if not text:
            return []
        start, self._start = self._start, []
        return [*start, CallArguments(0, text)]

    def finish(self) -> list[Part]:
        return []


class ArrayReader(MistralReader):
    """The answer is an array of calls, as behind Mistral's mark, and has no content: what was cut
    short of a call is none."""

    def __init__(self) -> None:
        super().__init__()
        self._state = State.MARKED

    def _say(self, text: str, parts: list[Part]) -> None:
        pass
