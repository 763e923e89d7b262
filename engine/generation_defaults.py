"""What a model's own files say about sampling and where its turns end.

Precedence is the caller's: the request first, then these, then OpenAI's defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import RequestError
from engine.models.json_config import JsonConfig, read_json_object
from engine.sampling import SamplingParams

logger = logging.getLogger(__name__)

WHOLE = ("top_k", "max_tokens")
# What a request leaves out is as the model recommends.
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


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

    def eos_below(self, vocab_size: int) -> tuple[int, ...]:
        """Those that can be drawn: a tokenizer may have more than the model has logits for."""
        return tuple(token for token in self.eos_token_ids if token < vocab_size)


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    generation = _optional_file(folder, "generation_config.json")
    return GenerationDefaults(
        eos_token_ids=tuple(sorted(_eos_token_ids(folder, generation))),
        temperature=_float(generation, "temperature"),
        top_p=_float(generation, "top_p"),
        top_k=_top_k(generation),
        min_p=_float(generation, "min_p"),
        repetition_penalty=_float(generation, "repetition_penalty"),
        max_new_tokens=_max_new_tokens(generation),
    )


def _optional_file(folder: Path, name: str) -> JsonConfig:
    path = folder / name
    return JsonConfig(read_json_object(path) if path.exists() else {}, str(path))


def _value(config: JsonConfig, key: str, field: str) -> Any:
    """Within the bounds of a request's: what no request may send would fail all that leave the
    field out."""
    value = config.raw(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer() and field in WHOLE:
        value = int(value)
    sent: dict[str, Any] = {field: value}
    try:
        return getattr(SamplingParams(**sent), field)
    except RequestError as error:
        if config.raw("do_sample") is not False:
            raise config.fail(key, error.message) from None
        # What is beside it is of no use to anyone, and transformers takes it.
        logger.warning("%s: %s: %r is not used: %s", config.where, key, value, error.message)
        return None


def _float(config: JsonConfig, key: str) -> float | None:
    value = _value(config, key, key)
    return None if value is None else float(value)


def _top_k(config: JsonConfig) -> int | None:
    """-1 is no limit, too, as in a request."""
    value = config.raw("top_k")
    return 0 if value == -1 else _value(config, "top_k", "top_k")


def _max_new_tokens(config: JsonConfig) -> int | None:
    """-1 is no limit, as some write it."""
    if config.raw("max_new_tokens") == -1:
        return None
    limit: int | None = _value(config, "max_new_tokens", "max_tokens")
    return limit


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
        if token is None or (type(token) is int and token == -1):  # there is none
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
            if isinstance(entry, dict) and entry.get("content") == eos and token.isdecimal():
                yield int(token)
    added = _optional_file(folder, "tokenizer.json").raw("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == eos:
            token_id = entry.get("id")
            if type(token_id) is int:
                yield token_id
