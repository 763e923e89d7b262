"""Grammars to draw from with the bundled model, and what says whether an answer fits."""

import functools
import json
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.grammar.library import Vocabulary
from engine.grammar.value import Grammar, GrammarKind
from engine.model_source import BUNDLED_FOLDER
from engine.sampling import SamplingParams
from engine.text.tokenizer import Tokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "ü"]}, "maxItems": 3},
        "boss": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "boss"],
    "additionalProperties": False,
}
DATE = r"(19|20)\d{2}-[01][0-9]-[a-f]{1,8}"
EOS = (1, 6)
VOCAB_SIZE = 4096
# A few hundred bytes that the library compiles for hours.
BOMB = {"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(60)]}


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(BUNDLED_FOLDER)


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer().to_json(), VOCAB_SIZE, EOS)


def schema(value: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def choice(*texts: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def prompt(text: str = "Tell me: ") -> list[int]:
    return tokenizer().encode(text)


def spelt(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def hot(grammar: Grammar | None, seed: int = 0, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "seed": seed, "grammar": grammar, **more})


def said(tokens: list[int]) -> str:
    """Without what ends the answer."""
    return tokenizer().decode([token for token in tokens if token not in EOS])


def make_engine(**knobs: Any) -> Engine:
    base: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 16,
        "max_model_len": 192,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 16 << 20,
        "num_threads": 1,
    }
    return Engine.create(EngineConfig(**{**base, **knobs}))
