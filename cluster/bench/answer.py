"""One answer as it comes: when its pieces came, what the server says of it, how it ended."""

import json
from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.bench.errors import ProtocolError
from cluster.bench.events import EventReader
from cluster.bench.prompts import Said

_MAX_ERROR_BYTES = 64 << 10
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "refusal")  # of a chat's delta


class FailureKind(StrEnum):
    STATUS = "refused"  # another status than 200
    ERROR_EVENT = "error in mid-stream"
    BROKEN = "connection broken"
    NOT_CONNECTED = "not connected"
    TIMEOUT = "timed out"
    PROTOCOL = "not understood"
    NO_USAGE = "no usage reported"
    NO_TOKEN_IDS = "no token ids for the next turn"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Failure:
    kind: FailureKind
    message: str
    status: int | None = None

    @property
    def label(self) -> str:
        """What failures are counted by."""
        return str(self.kind) if self.status is None else f"HTTP {self.status}"


@dataclass(frozen=True)
class Usage:
    """In tokens, as the server counts them."""

    num_prompt: int
    num_output: int
    num_cached: int = 0


@dataclass
class Tally:
    """What has been seen so far, of all answers; for whoever watches."""

    num_sent: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_chunks: int = 0


class Reception:
    """Takes an answer's bytes with the times at which they came."""

    def __init__(self, tally: Tally) -> None:
        self.any = False  # bytes, whatever they say
        self.first_s: float | None = None  # the first piece with text
        self.last_s: float | None = None
        self.gaps_s = array("d")  # between pieces with text; what came in one read has 0
        self.usage: Usage | None = None
        self.error: Failure | None = None
        self._tally = tally
        self._events = EventReader()
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._any_choice_s: float | None = None
        self._done = False
        self._error_body = b""

    def take(self, now: float, status: int, body: bytes) -> None:
        self.any = True
        if status != 200:
            self._error_body += body[: _MAX_ERROR_BYTES - len(self._error_body)]
            return
        for event in self._events.feed(body):
            if event == b"[DONE]":
                self._done = True
            else:
                self._take_chunk(now, _chunk(event))

    def said(self) -> Said:
        return Said("".join(self._texts), tuple(self._token_ids))

    def failure(self, status: int) -> Failure | None:
        """Of an answer that came to its end."""
        if status != 200:
            message = _error_message(self._error_body)
            return Failure(FailureKind.STATUS, message, status)
        if self.error is not None:
            return self.error
        if not self._done:
            return Failure(FailureKind.BROKEN, "the stream ended without [DONE]")
        if self.usage is None:
            return Failure(FailureKind.NO_USAGE, "needs stream_options.include_usage")
        if self.first_s is None and self.usage.num_output:
            # Its tokens have no text of their own.
            self.first_s = self.last_s = self._any_choice_s
        return None

    def _take_chunk(self, now: float, chunk: dict[str, Any]) -> None:
        try:
            if "error" in chunk:
                self.error = Failure(FailureKind.ERROR_EVENT, _message_of(chunk["error"]))
            for choice in chunk.get("choices", ()):
                self._any_choice_s = self._any_choice_s or now
                if ids := choice.get("token_ids"):
                    self._token_ids += ids
                if text := _text_of(choice):
                    self._note_text(now, text)
            if usage := chunk.get("usage"):
                self.usage = _usage_of(usage)
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"an event that is no completion's: {str(chunk)[:200]}") from error

    def _note_text(self, now: float, text: str) -> None:
        self._tally.num_chunks += 1
        self._texts.append(text)
        if self.last_s is None:
            self.first_s = now
        else:
            self.gaps_s.append(now - self.last_s)
        self.last_s = now


def _chunk(event: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"an event that is no JSON: {event[:200]!r}") from error
    if not isinstance(chunk, dict):
        raise ProtocolError(f"an event that is no object: {event[:200]!r}")
    return chunk


def _text_of(choice: dict[str, Any]) -> str:
    if "delta" not in choice:
        return str(choice.get("text") or "")
    delta = choice["delta"]
    texts = [delta[key] for key in _TEXT_KEYS if delta.get(key)]
    return "".join(texts) or (json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else "")


def _usage_of(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        int(usage["prompt_tokens"]),
        int(usage.get("completion_tokens") or 0),
        int(details.get("cached_tokens") or 0),
    )


def _error_message(body: bytes) -> str:
    try:
        return _message_of(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        return body.decode(errors="replace").strip()[:200]


def _message_of(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)
