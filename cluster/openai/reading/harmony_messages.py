"""An answer in Harmony, as gpt-oss writes it, taken apart: messages, whose headers say what each of
them is.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

A message to somebody says so in its role (`<|start|>assistant to=functions.f<|channel|>commentary`)
or behind its channel, and may say what it is written in: `<|constrain|>json`, or `json` alone.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple

from cluster.openai.reading.parts import Held, partial_at_end

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END = "<|constrain|>", "<|end|>"
_ENDS = (END, "<|return|>", "<|call|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)

_IN_HEADER = (CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
_MAX_END_CHARS = max(map(len, _ENDS))
_END = re.compile("|".join(map(re.escape, _ENDS)))
# What a message begins with: the answer's first stands behind `<|start|>assistant` of the prompt.
_OPENINGS, _FIRST_OPENINGS = (START, CHANNEL), (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
_TO = r"(?:\s*to=\s*([^\s<]*))?"
# Up to <|message|>. Models say their channel twice at times.
_HEADER = re.compile(
    rf"(?:<\|start\|>\s*[^\s<]*)?{_TO}"
    rf"(?:\s*<\|channel\|>\s*([^\s<]*){_TO})*"
    r"\s*(?:<\|constrain\|>\s*)?[^\s<]*\s*",
    re.ASCII,
)
_CHANNELS = ("analysis", "commentary", "final")
MAX_HEADER_CHARS = 512
_SPACE = " \t\r\n\f\v"
# Characters. Each mark is looked for, and what follows it copied, in no more than that.
_AT_ONCE = 1024


class Message(NamedTuple):
    """`number` counts the answer's. What is in no message is the first's, which has no channel
    then."""

    number: int = 0
    channel: str = ""
    to: str = ""


class Span(NamedTuple):
    """The next of the text: the message's, or nobody's, which is marks and headers. A message
    begins with one of no text."""

    text: str
    message: Message | None


class _State(Enum):
    BETWEEN = auto()  # messages
    HEADER = auto()
    MESSAGE = auto()


class HarmonyMessages:
    """The spans put together are the text, however that is cut. An end that no message follows,
    and a header that is none, are text of the message before them; a header that says its channel
    and has no <|message|> behind it ends there. Goes by marks and ASCII alone, so a text's bytes
    are cut where it is."""

    def __init__(self, begun: Message | None) -> None:
        """`begun` is a message in whose text the prompt ends."""
        self._message = Message() if begun is None else begun
        self._state = _State.BETWEEN if begun is None else _State.MESSAGE
        self._openings: tuple[str, ...] = _FIRST_OPENINGS
        self._held = Held()  # between messages: nobody's, if another follows or nothing
        self._text = ""  # not read yet

    def push(self, text: str) -> list[Span]:
        spans: list[Span] = []
        for at in range(0, len(text), _AT_ONCE):
            self._text += text[at : at + _AT_ONCE]
            while self._step(spans):
                pass
        return spans

    def finish(self) -> list[Span]:
        text = self._held.take() + self._text
        is_marks = any(mark in text for mark in MARKS)
        return [Span(text, None if is_marks else self._message)] if text else []

    def _step(self, spans: list[Span]) -> bool:
        """Whether there may be more to do with the text that is here."""
        match self._state:
            case _State.BETWEEN:
                return self._read_between(spans)
            case _State.HEADER:
                return self._read_header(spans)
            case _State.MESSAGE:
                return self._read_message(spans)

    def _read_between(self, spans: list[Span]) -> bool:
        text = self._text = self._held.add_start(self._text, _SPACE)
        if any(text.startswith(one) for one in self._openings):
            self._state = _State.HEADER
            return True
        end = _END.match(text)
        if end is not None:
            self._hold(end.end())
            return True
        if any(one.startswith(text) for one in (*self._openings, *_ENDS)):
            return False
        self._refuse(0, spans)
        return True

    def _read_header(self, spans: list[Span]) -> bool:
        text = self._text[:MAX_HEADER_CHARS]
        header = _HEADER.match(text)
        assert header is not None  # nothing is one, too
        rest = text[header.end() : header.end() + len(CONSTRAIN)]
        end = _END.match(rest)
        if rest.startswith(MESSAGE):
            self._begin(header, header.end() + len(MESSAGE), spans)
        elif end is not None:
            self._hold(header.end() + end.end())
            self._state = _State.BETWEEN
        elif len(text) < MAX_HEADER_CHARS and any(mark.startswith(rest) for mark in _IN_HEADER):
            return False
        elif header[2] in _CHANNELS:
            self._begin(header, max(header.end(2), header.end(3)), spans)
        else:
            opening = next(one for one in self._openings if text.startswith(one))
            self._refuse(len(opening), spans)
        return True

    def _begin(self, header: re.Match[str], num_chars: int, spans: list[Span]) -> None:
        self._hold(num_chars)
        spans.append(Span(self._held.take(), None))
        before, channel, behind = header.groups("")
        self._message = Message(self._message.number + 1, channel, before or behind)
        spans.append(Span("", self._message))
        self._state, self._openings = _State.MESSAGE, _OPENINGS

    def _read_message(self, spans: list[Span]) -> bool:
        end = _END.search(self._text)
        if end is None:
            keep = 0
            if "<" in self._text[1 - _MAX_END_CHARS :]:  # seldom: most of what this took
                keep = max(partial_at_end(self._text, one) for one in _ENDS)
            self._say(len(self._text) - keep, spans)
            return False
        self._say(end.start(), spans)
        self._hold(len(end.group()))
        self._state = _State.BETWEEN
        return True

    def _hold(self, num_chars: int) -> None:
        self._held.add(self._text[:num_chars])
        self._text = self._text[num_chars:]

    def _refuse(self, num_chars: int, spans: list[Span]) -> None:
        """What was held, and so much more, is the message's text after all, which goes on."""
        self._hold(num_chars)
        text = self._held.take()
        if text:
            spans.append(Span(text, self._message))
        self._state, self._openings = _State.MESSAGE, _OPENINGS

    def _say(self, num_chars: int, spans: list[Span]) -> None:
        if num_chars:
            spans.append(Span(self._text[:num_chars], self._message))
            self._text = self._text[num_chars:]
