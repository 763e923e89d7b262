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


def split_space(text: str) -> tuple[str, str]:
    """The text, and the white space that it ends with."""
    kept = text.rstrip()
    return kept, text[len(kept) :]
