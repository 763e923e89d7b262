"""Chat messages as templates expect them."""

import json
from collections.abc import Mapping, Sequence
from itertools import filterfalse, takewhile
from typing import Any

# Names that a message's reasoning comes under; templates read the first, a few the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def prepare(message: Mapping[str, Any], *, arguments_as_text: bool = False) -> dict[str, Any]:
    """A copy without nulls (templates would print them), with reasoning under its usual name and
    arguments of tool calls as objects (clients send what they got: JSON in a string) unless
    `arguments_as_text`."""
    copy = {name: _copied(value) for name, value in message.items() if value is not None}
    reasoning = next((copy[name] for name in _REASONING if name in copy), None)
    if reasoning is not None:
        copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
    for call in () if arguments_as_text else copy.get("tool_calls", ()):
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            function["arguments"] = _parsed(arguments)
    return copy


def by_the_system(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that know of no developers, as OpenAI calls who says what the system said."""
    if message.get("role") == "developer":
        message["role"] = "system"
    return message


def with_one_beginning(chat: Sequence[dict[str, Any]], *, of_all: bool) -> list[dict[str, Any]]:
    """For templates that know one message of the system's: what several of them say at the
    beginning is in the first, or `of_all` there are, where others would be left out."""
    beginning = list(takewhile(_is_of_the_system, chat))
    said = list(filter(_is_of_the_system, chat)) if of_all else beginning
    if said == chat[: len(said)] and len(said) < 2:
        return [*chat]
    texts = [flatten_content({**message}).get("content") or "" for message in said]
    rest = filterfalse(_is_of_the_system, chat) if of_all else chat[len(said) :]
    return [{"role": said[0]["role"], "content": "\n\n".join(texts)}, *rest]


def _is_of_the_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")


def with_content(message: dict[str, Any], *, of_calls: str | None) -> dict[str, Any]:
    """An assistant that only calls or reasons says nothing: templates look into what it says."""
    if message.get("role") == "assistant":
        message.setdefault("content", of_calls if "tool_calls" in message else "")
    return message


def thinking_alone(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that refuse what a caller of tools says beside what it thinks: both as that."""
    thinking, content = message.get("thinking"), message.get("content")
    if "tool_calls" in message and thinking and content:
        message["thinking"] = f"{thinking}\n\n{content}"
        del message["content"]
    return message


def with_description(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """For templates that take a text: none is an empty one."""
    function = tool.get("function", {})
    return {**tool, "function": {**function, "description": function.get("description") or ""}}


def flatten_content(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that take a string: the text parts, one per line."""
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "\n".join(part.get("text", "") for part in content)
    return message


def split_content(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that take nothing but parts: a string as one."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = [{"type": "text", "text": content}]
    return message


def _parsed(arguments: str) -> Any:
    """What a model wrote is what its client sends back: with raw line breaks, or cut short."""
    try:
        return json.loads(arguments, strict=False) if arguments else {}
    except (ValueError, RecursionError):
        return arguments


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value
