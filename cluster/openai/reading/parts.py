"""What readers make of text."""

from __future__ import annotations

from typing import AnyStr, NamedTuple, Protocol


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """A tool call, whose arguments follow; `call` counts the answer's."""

    call: int
    name: str
    id: str | None = None  # if the model gave it one


class CallArguments(NamedTuple):
    """The next piece of a call's arguments: JSON as the model writes it."""

    call: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


class Reader(Protocol):
    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """What was held back in case more would come. The reader is done."""
        ...


class PlainReader:
    """Everything is content."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def partial_at_end(text: AnyStr, marker: AnyStr) -> int:
    """How much of the text's end may be the beginning of the marker."""
    if marker[:1] not in text[1 - len(marker) :]:  # nearly always: a third of the time
        return 0
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class Held:
    """Text that may be nobody's, in pieces: white space goes on for as long as a client likes, and
    none of it is looked at, or copied, once for every token that follows."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def take(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def add_start(self, text: str, chars: str | None = None) -> str:
        """As much as begins with these characters, or white space; what is behind it."""
        rest = text.lstrip(chars)
        self.add(text[: len(text) - len(rest)])
        return rest

    def push(self, text: str) -> str:
        """All that is somebody's: what is held and this, without the white space at its end."""
        kept = text.rstrip()
        said = self.take() + kept if kept else ""
        self.add(text[len(kept) :])
        return said
