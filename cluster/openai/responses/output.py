"""An answer's items as they grow, and the events that tell of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from cluster.openai.reading.parts import CallArguments, CallStart, Content, Part, Reasoning
from cluster.openai.responses.items import seal
from cluster.openai.responses.tools import Tools
from cluster.openai.wording import Json


class Output:
    """Made of what is read of an answer. Its events still lack their numbers."""

    def __init__(
        self,
        uid: str,
        tools: Tools,
        call_id: Callable[[CallStart], str],
        *,
        seals_reasoning: bool,
    ) -> None:
        self.items: list[Json] = []
        self._uid = uid
        self._tools = tools
        self._call_id = call_id
        self._seals_reasoning = seals_reasoning
        self._open: _Item | None = None

    def push(self, parts: Iterable[Part], logprobs: Sequence[Json] = ()) -> list[Json]:
        """`logprobs`, of the parts' tokens, are told with the first of their content."""
        events: list[Json] = []
        for part in parts:
            match part:
                case Reasoning(text) if text:
                    if not isinstance(self._open, _Reasoning):
                        events += self._begin(_Reasoning(self._seals_reasoning))
                    events += self._grow(text)
                case Content(text) if text:
                    if not isinstance(self._open, _Message):
                        events += self._begin(_Message())
                    events += self._grow(text, logprobs)
                    logprobs = ()
                case CallStart(name=name):
                    call = _Call(self._call_id(part), self._tools.name_of(name))
                    events += self._begin(call)
                case CallArguments(text=text):
                    events += self._grow(text)
        return events

    def finish(self, status: Literal["completed", "incomplete"]) -> list[Json]:
        """Only the last item can be cut off. An answer of nothing is an empty message."""
        begun = [] if self.items else self._begin(_Message())
        return begun + self._end(status)

    def _begin(self, item: _Item) -> list[Json]:
        ended = self._end("completed")
        index = len(self.items)
        item.place(f"{item.prefix}_{self._uid}-{index}", index)
        self._open = item
        self.items.append(item.fields)
        return ended + item.begun()

    def _grow(self, text: str, logprobs: Sequence[Json] = ()) -> list[Json]:
        assert self._open is not None
        return [self._open.grown(text, logprobs)] if text else []

    def _end(self, status: str) -> list[Json]:
        item, self._open = self._open, None
        return [] if item is None else item.ended(status)


class _Item:
    """One that grows by text. `fields` is what it is in the response."""

    prefix: str  # of its id
    grows: str  # the name of the event

    def __init__(self, fields: Json) -> None:
        self.fields = fields
        self._texts: list[str] = []
        self._index = 0

    def place(self, item_id: str, index: int) -> None:
        self.fields |= {"id": item_id, "status": "in_progress"}
        self._index = index

    def begun(self) -> list[Json]:
        return [self._item("added")]

    def grown(self, text: str, logprobs: Sequence[Json]) -> Json:
        self._texts.append(text)
        return self._event(f"{self.grows}.delta", delta=text)

    def ended(self, status: str) -> list[Json]:
        self.fields["status"] = status
        return [self._item("done")]

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _item(self, what: str) -> Json:
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": self._index, "item": {**self.fields}}

    def _event(self, kind: str, **fields: Any) -> Json:
        where = {"item_id": self.fields["id"], "output_index": self._index}
        return {"type": f"response.{kind}", **where, **fields}


class _Call(_Item):
    prefix, grows = "fc", "function_call_arguments"

    def __init__(self, call_id: str, name: Json) -> None:
        super().__init__({"type": "function_call", "call_id": call_id, **name, "arguments": ""})

    def ended(self, status: str) -> list[Json]:
        name, text = self.fields["name"], self._text
        self.fields["arguments"] = text
        done = self._event(f"{self.grows}.done", name=name, arguments=text)
        return [done, *super().ended(status)]


class _WithPart(_Item, ABC):
    """Whose text is in a part of its content."""

    def begun(self) -> list[Json]:
        return [*super().begun(), self._part("added")]

    def ended(self, status: str) -> list[Json]:
        part = self._as_part()
        self.fields["content"] = [part]
        rest = {name: part[name] for name in ("text", "logprobs") if name in part}
        done = self._event(f"{self.grows}.done", content_index=0, **rest)
        return [done, self._part("done"), *super().ended(status)]

    def _part(self, what: str) -> Json:
        return self._event(f"content_part.{what}", content_index=0, part=self._as_part())

    @abstractmethod
    def _as_part(self) -> Json:
        """The part as it is now."""


class _Message(_WithPart):
    prefix, grows = "msg", "output_text"

    def __init__(self) -> None:
        super().__init__({"type": "message", "role": "assistant", "content": []})
        self._logprobs: list[Json] = []

    def grown(self, text: str, logprobs: Sequence[Json]) -> Json:
        self._logprobs += logprobs
        return {**super().grown(text, ()), "content_index": 0, "logprobs": list(logprobs)}

    def _as_part(self) -> Json:
        logprobs = list(self._logprobs)  # which an event has as they are now
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": logprobs}


class _Reasoning(_WithPart):
    prefix, grows = "rs", "reasoning_text"

    def __init__(self, is_sealed: bool) -> None:
        super().__init__({"type": "reasoning", "summary": [], "content": []})
        self._is_sealed = is_sealed

    def grown(self, text: str, logprobs: Sequence[Json]) -> Json:
        return {**super().grown(text, ()), "content_index": 0}

    def ended(self, status: str) -> list[Json]:
        if self._is_sealed:
            self.fields["encrypted_content"] = seal(self._text)
        return super().ended(status)

    def _as_part(self) -> Json:
        return {"type": "reasoning_text", "text": self._text}
