"""What a model's own files say about sampling and where its turns end.

Precedence is the caller's: the request first, then these, then OpenAI's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.models.json_config import JsonConfig, read_json_object


@dataclass(frozen=True)
class GenerationDefaults:
    """None where the model says nothing. `do_sample` is not read: a temperature of 0 says it."""

    eos_token_ids: tuple[int, ...] = ()  # ascending; any of them ends an answer
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0: no limit
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    generation = _optional_file(folder, "generation_config.json")
    return GenerationDefaults(
        eos_token_ids=tuple(sorted(_eos_token_ids(folder, generation))),
        temperature=_number(generation, "temperature", 0.0, None),
        top_p=_number(generation, "top_p", 0.0, 1.0),
        top_k=generation.optional_integer("top_k", minimum=0),
        min_p=_number(generation, "min_p", 0.0, 1.0),
        repetition_penalty=generation.optional_number("repetition_penalty"),
        max_new_tokens=generation.optional_integer("max_new_tokens"),
    )


def _optional_file(folder: Path, name: str) -> JsonConfig:
    path = folder / name
    return JsonConfig(read_json_object(path) if path.exists() else {}, str(path))


def _number(config: JsonConfig, key: str, low: float, high: float | None) -> float | None:
    value = config.raw(key)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not low <= value <= (math.inf if high is None else high)
    ):
        bounds = f"at least {low}" if high is None else f"in {low} .. {high}"
        raise config.fail(key, f"{value!r}, must be a number {bounds}")
    return float(value)


def _eos_token_ids(folder: Path, generation: JsonConfig) -> set[int]:
    """Every end that any of the files names: chat models often add theirs in one file only."""
    config = _optional_file(folder, "config.json")
    ids = set(_token_ids(generation)) | set(_token_ids(config))
    text = config.section("text_config")
    if text is not None:
        ids |= set(_token_ids(text))
    return ids | set(_tokenizer_eos(folder))


def _token_ids(config: JsonConfig) -> Iterator[int]:
    value = config.raw("eos_token_id")
    for token in value if isinstance(value, list) else [value]:
        if token is None:
            continue
        if type(token) is not int or token < 0:
            raise config.fail("eos_token_id", f"{value!r}, must be a token id or a list of them")
        yield token


def _tokenizer_eos(folder: Path) -> Iterator[int]:
    """The id of tokenizer_config.json's `eos_token`, which is given as text."""
    tokenizer = _optional_file(folder, "tokenizer_config.json")
    eos = tokenizer.raw("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    if not isinstance(eos, str):
        return
    decoder = tokenizer.raw("added_tokens_decoder")
    if isinstance(decoder, dict):
        for token, entry in decoder.items():
            if isinstance(entry, dict) and entry.get("content") == eos and token.isdigit():
                yield int(token)
    added = _optional_file(folder, "tokenizer.json").raw("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == eos:
            token_id = entry.get("id")
            if type(token_id) is int:
                yield token_id
