"""Server-sent events of a streamed answer, most of them written without building any JSON."""

import json
from typing import Any

from cluster.openai.generation import ChoicePart
from cluster.openai.wording import Json, Wording

# ASCII alone: whatever cuts the bytes on their way to the client cuts no character.
dump = json.JSONEncoder(separators=(",", ":")).encode
_PIECE = 4096  # elements of a list that are dumped at once
_SAMPLE = "\0"  # stands for the text in the frame that is cut around it


class EventWriter:
    """Frames for one response. Plain text costs one string escape and two joins."""

    def __init__(self, envelope: Json, wording: Wording, *, usage_in_events: bool) -> None:
        """`usage_in_events`: every event has the key, null but in the last, as OpenAI has it."""
        self._envelope = envelope
        self._wording = wording
        self._usage_in_events = usage_in_events
        self._text_frames: dict[int, tuple[bytes, bytes]] = {}

    def event(
        self, choices: list[Json], usage: Json | None = None, beside: Json | None = None
    ) -> bytes:
        chunk: dict[str, Any] = {**self._envelope, "choices": choices, **(beside or {})}
        if self._usage_in_events or usage is not None:
            chunk["usage"] = usage
        return f"data: {dump(chunk)}\n\n".encode()

    def text(self, choice: int, text: str) -> bytes:
        """The event of a part that has text and nothing else."""
        frame = self._text_frames.get(choice)
        if frame is None:
            frame = self._text_frames[choice] = self._cut(choice)
        return frame[0] + dump(text).encode() + frame[1]

    def _cut(self, choice: int) -> tuple[bytes, bytes]:
        part = ChoicePart(choice, _SAMPLE, (), None, None, None, None)
        before, _, after = self.event([self._wording.delta(part)]).rpartition(
            dump(_SAMPLE).encode()
        )
        return before, after


def dump_long(answer: Json) -> bytes:
    """Of an object with long lists: `dump` lets no other thread run before its end."""
    fields = [f"{dump(name)}:{_dump_value(value)}" for name, value in answer.items()]
    return f"{{{','.join(fields)}}}".encode()


def _dump_value(value: object) -> str:
    if not isinstance(value, list):
        return dump(value)
    pieces = [dump(value[i : i + _PIECE])[1:-1] for i in range(0, len(value), _PIECE)]
    return f"[{','.join(pieces)}]"
