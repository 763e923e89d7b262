"""Answers that say a prompt once for each of many choices are never in memory as a whole."""

import asyncio
import json
import math
from typing import Any

import pytest

from cluster import http_exchange
from tests.cluster.conftest import Server, read_events
from tests.cluster.fakes import MAX_MODEL_LEN

PROMPT = "x" * (MAX_MODEL_LEN // 2)
N = 32
LONG: dict[str, Any] = {"prompt": [PROMPT] * 2, "n": N, "max_tokens": 1}


async def messages_of(
    server: Server, num_taken: float = math.inf, timeout_s: float = 60, **fields: Any
) -> list[dict[str, Any]]:
    """As they go to whoever carries them, and takes so many."""
    sent: list[dict[str, Any]] = []
    body = json.dumps({**LONG, **fields}).encode()
    path = "/v1/completions"
    waiting = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message: Any) -> None:
        if len(sent) >= num_taken:
            await asyncio.Event().wait()
        sent.append(message)

    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode()},
        **{
            "query_string": b"",
            "root_path": "",
            "headers": [(b"x-request-timeout", f"{timeout_s}".encode())],
        },
    }
    await server.app(scope, receive, send)
    assert sent[0]["status"] == 200
    return sent


def text_of(sent: list[dict[str, Any]]) -> str:
    *others, last = [message.get("more_body", False) for message in sent[1:]]
    assert all(others)
    assert not last
    return b"".join(message["body"] for message in sent[1:]).decode()


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 20}, {"echo": True}, {"echo": True, "logprobs": 5}]
)
async def test_a_whole_answer_goes_out_in_parts(
    server: Server, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    at_once = json.loads(text_of(await messages_of(server, **fields)))
    monkeypatch.setattr(http_exchange, "_PART_BYTES", 1000)
    sent = await messages_of(server, **fields)
    text = text_of(sent)
    whole = json.loads(text)
    assert whole["choices"] == at_once["choices"]
    assert whole["usage"] == at_once["usage"]
    assert len(whole["choices"]) == 2 * N
    assert max(len(message["body"]) for message in sent[1:]) < len(text) / 8


@pytest.mark.parametrize("fields", [{"echo": True}, {"return_token_ids": True}])
async def test_a_stream_begins_choice_by_choice(server: Server, fields: dict[str, Any]) -> None:
    sent = await messages_of(server, stream=True, **fields)
    text = text_of(sent)
    assert {event["choices"][0]["index"] for event in read_events(text)} == set(range(2 * N))
    assert max(len(message["body"]) for message in sent[1:]) < len(text) / 8


async def test_the_end_of_a_stream_goes_out_with_its_last_tokens(server: Server) -> None:
    last = (await messages_of(server, stream=True))[-1]["body"]
    assert b'"finish_reason":"length"' in last
    assert last.endswith(http_exchange.DONE)


async def test_one_whose_time_is_over_in_its_middle_just_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error has no place there."""
    monkeypatch.setattr(http_exchange, "_PART_BYTES", 1000)
    sent = await messages_of(server, num_taken=3, timeout_s=0.5, echo=True)
    assert [message["type"] for message in sent] == [
        "http.response.start",
        "http.response.body",
        "http.response.body",
    ]
    assert all(message["more_body"] for message in sent[1:])
