"""Reasoning that a model writes before its answer, between two marks."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from cluster.openai.reading.parts import Held, Part, Reader, Reasoning, partial_at_end


class Marks(NamedTuple):
    start: str
    end: str
    title: str = ""  # what always stands behind the first

    @property
    def opening(self) -> str:
        return self.start + self.title

    def is_open_in(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer begins within: the prompt's last words are the mark, or the message
        that it continues, with which the prompt ends, began with it and has no end of it."""
        if prompt.rstrip().endswith(self.opening):
            return True
        return continued.lstrip().startswith(self.opening) and self.end not in continued

    def may_begin_after(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer may begin with it: not where the prompt has ended it, as templates do
        that are told to do without, nor in the middle of a message."""
        return not continued and not prompt.rstrip().endswith(self.end)


class _State(Enum):
    OPENING = auto()
    INSIDE = auto()
    AFTER = auto()
    CONTENT = auto()


class ReasoningReader:
    """Reasoning comes first or not at all; marks within the content are content. White space
    around reasoning is nobody's."""

    def __init__(self, marks: Marks, content: Reader, *, is_open: bool) -> None:
        """`is_open`: the prompt ended within (the model may repeat the first mark)."""
        self._marks = marks
        self._content = content
        self._is_open = is_open
        self._state = _State.OPENING
        self._space = Held()  # before the text
        self._text = ""
        self._said_any = False

    def push(self, text: str) -> list[Part]:
        if self._state is _State.CONTENT:
            return self._content.push(text)
        self._text += text
        parts: list[Part] = []
        if self._state is _State.OPENING:
            self._open()
        if self._state is _State.INSIDE:
            parts += self._read_inside()
        if self._state is _State.AFTER:
            self._text = self._text.lstrip()
            if self._text:
                self._state = _State.CONTENT
        if self._state is _State.CONTENT:
            text, self._text = self._space.take() + self._text, ""
            parts += self._content.push(text)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        match self._state:
            case _State.INSIDE:
                parts += self._say(self._space.push(self._text))
            case _State.OPENING if self._is_open:
                parts += self._say(self._text)
            case _State.OPENING:
                parts += self._content.push(self._space.take() + self._text)
        return parts + self._content.finish()

    def _open(self) -> None:
        start = self._marks.opening
        self._text = self._space.add_start(self._text)
        if self._text.startswith(start):
            self._state, self._text = _State.INSIDE, self._text[len(start) :]
        elif not start.startswith(self._text):
            self._state = _State.INSIDE if self._is_open else _State.CONTENT

    def _read_inside(self) -> list[Part]:
        end = self._text.find(self._marks.end)
        if end >= 0:
            text, self._text = self._text[:end], self._text[end + len(self._marks.end) :]
            said, self._space = self._space.push(text), Held()
            self._state = _State.AFTER
            return self._say(said)
        keep = len(self._text) - partial_at_end(self._text, self._marks.end)
        text, self._text = self._text[:keep], self._text[keep:]
        return self._say(self._space.push(text))

    def _say(self, text: str) -> list[Part]:
        if not self._said_any:
            text = text.lstrip()
        if not text:
            return []
        self._said_any = True
        return [Reasoning(text)]
