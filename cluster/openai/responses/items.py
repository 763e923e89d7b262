"""What a model is told in /v1/responses: items, and the turns of a chat that they are."""

import base64
import binascii
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Literal

from pydantic import Field, model_validator

from cluster.openai.body import CacheMark, Part, part_of
from cluster.openai.chat_request import MAX_MESSAGES
from cluster.openai.errors import bad_request
from cluster.openai.responses.tools import in_namespace
from cluster.openai.wording import Json
from engine.errors import RequestError

_OF_SYSTEM = ("system", "developer")
_TEXTS = ("content", "reasoning_content")
_SEALED = "text:"  # of what stands for `encrypted_content`


class _Item(Part):
    """`id` and the like are those of an answer's items, also of OpenAI's, which clients send back
    as they got them, with null for what they do not have."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    created_by: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if one is not None}


class _Message(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Any
    phase: Literal["commentary", "final_answer"] | None = None  # templates have no place for it


class _Caller(Part):
    type: Literal["direct"]


class _Call(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    caller: _Caller | None = None
    async_: Literal[False] = Field(False, alias="async")
    parsed_arguments: Any = None  # the official client's reading of them, sent back


class _CallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Any
    name: str | None = None
    namespace: str | None = None
    caller: _Caller | None = None


class _ReasoningText(Part):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _Reasoning(_Item):
    type: Literal["reasoning"]
    summary: list[_ReasoningText] | None = None
    content: list[_ReasoningText] | None = None
    encrypted_content: str | None = None


KINDS: dict[str, type[_Item]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _CallOutput,
    "reasoning": _Reasoning,
}


class _Text(_Item):
    """Of a message's content; what follows the text as an answer has it, or as the official client
    adds to one."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    cache_control: CacheMark = None
    prompt_cache_breakpoint: CacheMark = None


class _Refusal(Part):
    type: Literal["refusal"]
    refusal: str


def seal(reasoning: str) -> str:
    """What clients hand back in its place who want reasoning as something that they do not read."""
    return _SEALED + base64.b64encode(reasoning.encode(errors="replace")).decode()


def messages_of(instructions: str | None, given: str | Sequence[Any]) -> list[Json]:
    """ApiError for an item that cannot be. Templates know one message of the system's, at the
    beginning: instructions, and all that its messages say there, are that one."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if len(items) > MAX_MESSAGES:
        raise RequestError("input", f"must have at most {MAX_MESSAGES} elements")
    chat = _Chat()
    for number, item in enumerate(items):
        chat.add(_read(item, path := f"input[{number}]"), path)
    return _with_one_beginning(instructions, chat.messages)


def _with_one_beginning(instructions: str | None, messages: Sequence[Json]) -> list[Json]:
    said = list(takewhile(lambda message: message["role"] in _OF_SYSTEM, messages))
    texts = [*([instructions] if instructions else ()), *(message["content"] for message in said)]
    if len(texts) < 2 and not instructions:
        return [*messages]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[len(said) :]]


def _read(item: Any, path: str) -> _Item:
    if not isinstance(item, dict):
        raise bad_request(path, f"{path}: must be an object", "invalid_value")
    kind = item.get("type") or "message"
    if kind == "item_reference":
        message = f"{path}: nothing is kept here that an item could refer to"
        raise bad_request(path, message, "unsupported_parameter")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(map(repr, KINDS))
        message = f"{path}.type: must be one of {known}"
        raise bad_request(f"{path}.type", message, "invalid_value")
    return part_of(KINDS[kind], {**item, "type": kind}, path)


class _Chat:
    """Turns as they are put together: reasoning, text and calls of a model's are one."""

    def __init__(self) -> None:
        self._turns: list[Json] = []  # their texts in pieces: there may be many
        self._turn: Json | None = None  # the model's, that the next item may go on with

    @property
    def messages(self) -> list[Json]:
        return [
            {name: "".join(value) if name in _TEXTS else value for name, value in turn.items()}
            for turn in self._turns
        ]

    def add(self, item: _Item, path: str) -> None:
        match item:
            case _Message(role="assistant", content=content):
                texts = _texts_of(content, f"{path}.content")
                self._turn_for("content").setdefault("content", []).extend(texts)
            case _Message(role=role, content=content):
                self._add_other({"role": role, "content": _texts_of(content, f"{path}.content")})
            case _Call(call_id=call_id, name=name, namespace=namespace, arguments=arguments):
                function = {"name": in_namespace(namespace, name), "arguments": arguments}
                calls = self._turn_that_calls().setdefault("tool_calls", [])
                calls.append({"id": call_id, "type": "function", "function": function})
            case _CallOutput(call_id=call_id, output=output):
                texts = _texts_of(output, f"{path}.output")
                self._add_other({"role": "tool", "tool_call_id": call_id, "content": texts})
            case _Reasoning():
                if text := _reasoning_of(item, path):
                    turn = self._turn_for("reasoning_content", "content")
                    turn.setdefault("reasoning_content", []).append(text)

    def _add_other(self, message: Json) -> None:
        self._turn = None
        self._turns.append(message)

    def _turn_for(self, *before: str) -> Json:
        """A new one if that under way has something of these, which come before. One with calls
        goes on, as templates know it: their results are what comes next."""
        turn = self._turn
        if turn is None or ("tool_calls" not in turn and any(name in turn for name in before)):
            turn = self._turn = {"role": "assistant"}
            self._turns.append(turn)
        return turn

    def _turn_that_calls(self) -> Json:
        """What was thought between a text and a call is of their turn, as the chat has it."""
        turn = self._turn_for()
        before = self._turns[-2] if len(self._turns) > 1 else {}
        if turn.keys() == {"role", "reasoning_content"} and before.get("role") == "assistant":
            before.setdefault("reasoning_content", []).extend(turn["reasoning_content"])
            self._turns.pop()
            turn = self._turn = before
        return turn


def _texts_of(content: Any, path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        message = f"{path}: must be a string or an array of text parts"
        raise bad_request(path, message, "invalid_value")
    return [_text_of_part(part, f"{path}[{i}]") for i, part in enumerate(content)]


def _text_of_part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_image", "input_file", "input_audio"):
        message = f"{path}: {kind} is not supported"
        raise bad_request(path, message, "unsupported_parameter")
    if kind == "refusal":
        return part_of(_Refusal, part, path).refusal
    return part_of(_Text, part, path).text


def _reasoning_of(item: _Reasoning, path: str) -> str:
    """The summary is of other servers' answers: ours have none."""
    if item.content or not item.encrypted_content:
        return "".join(part.text for part in item.content or item.summary or ())
    sealed = item.encrypted_content
    try:
        if not sealed.startswith(_SEALED):
            raise ValueError
        return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        path = f"{path}.encrypted_content"
        message = f"{path}: must be as an answer of this server's had it"
        raise bad_request(path, message, "invalid_value") from None
