"""What may be said of tools, and that a template gets it as it was said."""

import json
from typing import Any

import pytest

from cluster.openai.body import parse
from cluster.openai.chat_request import ChatRequest
from cluster.openai.errors import ApiError
from engine.errors import RequestError

FUNCTION = "tools[0].function"


def tools(*functions: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function} for function in functions]}


def request(said: dict[str, Any]) -> ChatRequest:
    messages = [{"role": "user", "content": "Hello"}]
    return parse(ChatRequest, json.dumps({"messages": messages, **said}).encode())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (tools({"name": "f", "paramaters": {}}), f"unknown parameter '{FUNCTION}.paramaters'"),
        (tools({}), f"{FUNCTION}.name is required"),
        (
            tools({"name": "f", "description": 5}),
            f"{FUNCTION}.description: must be a string, not 5",
        ),
        (
            tools({"name": "f", "parameters": "{}"}),
            f"{FUNCTION}.parameters: must be an object, not a string",
        ),
        (
            tools({"name": "a b"}),
            f"{FUNCTION}.name: must be 1 to 128 characters, no white space and none of"
            " < > \" ' ( ) { } [ ] , \\",
        ),
        (
            tools({"name": "f"}, {"name": "f"}),
            "tools: must be of different names, not twice 'f'",
        ),
    ],
)
def test_rules_are_told_in_words(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as raised:
        request(said)
    assert (raised.value.status, raised.value.message) == (400, message)
    assert raised.value.param
    assert raised.value.param in message


def test_tools_are_kept_as_they_were_written() -> None:
    """`return` is one of Hugging Face's, which templates print."""
    said = tools(
        {"name": "f", "return": {"type": "string"}, "parameters": None},
        {"type": "function", "name": "मौसम", "parameters": {"type": ["object", "null"]}},
        {"name": "mcp/g.h:i-j", "parameters": {"type": "array"}},
    )
    assert request(said).wanted_calls.tools == said["tools"]


def test_no_tools_are_as_none_said() -> None:
    """Templates ask whether there is a list, and not what it holds."""
    for choice in (None, "auto", "none"):
        assert request({"tools": [], "tool_choice": choice}).wanted_calls.tools is None
    with pytest.raises(RequestError, match="needs tools"):
        _ = request({"tools": [], "tool_choice": "required"}).wanted_calls
