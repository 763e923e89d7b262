"""What the formats of tool calls have in common: content, a mark, calls, content again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto

from cluster.openai.reading.call_object import CallObject, NamedCall
from cluster.openai.reading.gemma_call import GemmaCall
from cluster.openai.reading.parts import Content, Held, Part, partial_at_end
from cluster.openai.reading.tagged_call import TaggedCall

# Characters. Each mark is looked for, and what follows it copied, in no more than that.
_AT_ONCE = 1024


class State(Enum):
    CONTENT = auto()
    MARKED = auto()  # behind a mark, before it is known what follows
    CALL = auto()
    AFTER = auto()  # behind a call


class MarkedReader(ABC):
    """White space around calls is nobody's, but for what keeps the text behind one from that before
    it. A mark that no call follows is content.

    Every step decides by what nothing that comes later could change, or waits: that is why it
    does not matter how the text is cut.
    """

    marker: str
    unmarked = ""  # what a call begins with, where the mark before it may be missing

    def __init__(self, state: State = State.CONTENT) -> None:
        self._state = state
        self._text = ""  # not read yet
        self._held = Held()  # read, and content unless a call follows
        self._found = ""  # the mark, or `unmarked`, that was read last
        self._num_calls = 0
        self._said_any = False
        self._call: CallObject | NamedCall | TaggedCall | GemmaCall | None = None

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for at in range(0, len(text), _AT_ONCE):
            self._text += text[at : at + _AT_ONCE]
            while self._step(parts):
                pass
        return parts

    def finish(self) -> list[Part]:
        match self._state:
            case State.CONTENT:
                text = self._held.take() + self._text
                text = text.rstrip() if self._num_calls else text
            case State.MARKED:
                text = self._held.take() + self._text
            case State.CALL:
                call = self._call
                text = "" if call is None or call.is_call else self._held.take() + call.text
            case State.AFTER:
                text = ""
        parts: list[Part] = []
        self._say(text, parts)
        return parts

    @property
    def beginnings(self) -> Sequence[str]:
        """What a call may begin with."""
        return [mark for mark in (self.marker, self.unmarked) if mark]

    @abstractmethod
    def _read_marked(self, parts: list[Part]) -> bool:
        """As `_step`, behind a mark."""

    @abstractmethod
    def _read_after(self, parts: list[Part]) -> bool:
        """As `_step`, behind a call."""

    def _step(self, parts: list[Part]) -> bool:
        """Whether there may be more to do with the text that is here."""
        match self._state:
            case State.CONTENT:
                return self._read_content(parts)
            case State.MARKED:
                return self._read_marked(parts)
            case State.CALL:
                return self._read_call(parts)
            case State.AFTER:
                return self._read_after(parts)

    def _read_content(self, parts: list[Part]) -> bool:
        marks = self.beginnings
        found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        at, self._found = min(found, default=(-1, ""))
        partial = max(partial_at_end(self._text, mark) for mark in marks)
        keep = at if found else len(self._text) - partial
        self._say(self._held.push(self._text[:keep]), parts)
        self._text = self._text[keep:]
        if not found:
            return False
        self._hold(len(self._found))
        self._state = State.MARKED
        return True

    def _read_call(self, parts: list[Part]) -> bool:
        assert self._call is not None
        text, self._text = self._text, ""
        parts += self._call.push(text)
        if self._call.rest is None:
            return False
        self._text = self._call.rest
        if self._call.is_call:
            self._held, self._state = Held(), State.AFTER
            self._num_calls += 1
        else:
            self._held.add(self._call.text)
            self._refuse(parts)
        return True

    def _hold(self, num_chars: int) -> None:
        self._held.add(self._text[:num_chars])
        self._text = self._text[num_chars:]

    def _hold_start(self, chars: str | None = None) -> None:
        self._text = self._held.add_start(self._text, chars)

    def _begin_call(self, is_tool: Callable[[str], bool] | None = None) -> None:
        """With the text's first brace."""
        self._call = CallObject(self._num_calls, is_tool)
        self._state = State.CALL

    def _refuse(self, parts: list[Part]) -> None:
        """What was held is content after all; a call may still follow the white space at its
        end."""
        self._say(self._held.push(self._held.take()), parts)
        self._state = State.CONTENT

    def _say(self, text: str, parts: list[Part]) -> None:
        if self._num_calls and not self._said_any:
            text = text.lstrip()
        if text:
            parts.append(Content(text))
            self._said_any = True
