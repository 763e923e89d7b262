"""What the server under load is: its model's name, and how it counts tokens."""

import json
from dataclasses import dataclass
from typing import Any

from cluster.bench.client import Client
from cluster.bench.errors import BrokenAnswerError, ProtocolError
from cluster.bench.words import WORDS
from engine.errors import ConfigError

_NOT_THERE = (404, 405, 422, 501)  # 422: it is, and asks for other fields


@dataclass(frozen=True)
class WordTokens:
    """What the server's tokenizer makes of our words."""

    token_ids: tuple[int, ...]  # each once
    per_word: float


async def first_model(client: Client) -> str:
    answer = await _fetch(client, "GET", "/v1/models")
    if answer is None:
        raise ConfigError("model", "the server lists none (no /v1/models); name it")
    try:
        return str(answer["data"][0]["id"])
    except (TypeError, KeyError, IndexError) as error:
        raise ConfigError("model", f"/v1/models lists none: {str(answer)[:200]}") from error


async def word_tokens(client: Client, model: str) -> WordTokens | None:
    """None where there is no /tokenize that knows these fields: llama.cpp's, which asks for others,
    makes no tokens of them."""
    fields = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    answer = await _fetch(client, "POST", "/tokenize", fields)
    if answer is None:
        return None
    try:
        ids = [int(token_id) for token_id in answer["tokens"]]
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError("url", f"/tokenize gave no tokens: {str(answer)[:200]}") from error
    return WordTokens(tuple(sorted(set(ids))), len(ids) / len(WORDS)) if ids else None


async def _fetch(client: Client, method: str, path: str, fields: Any = None) -> Any:
    try:
        status, body = await client.fetch(method, path, fields)
    except (OSError, BrokenAnswerError, ProtocolError) as error:
        raise ConfigError("url", f"{path} cannot be asked: {str(error) or 'no answer'}") from error
    if status in _NOT_THERE:
        return None
    text = body.decode(errors="replace")
    if status == 401:
        needed = "must name the variable that has a key which the server takes"
        raise ConfigError("api_key_env", f"{needed}; {path} answers: {text[:200]}")
    if status != 200:
        raise ConfigError("url", f"{path} answers {status}: {text[:200]}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError("url", f"{path} gives no JSON: {text[:200]}") from error
