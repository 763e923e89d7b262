"""SamplingParams, field by field: absent ones have their defaults on both sides."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from engine.errors import RequestError
from engine.grammar.value import Grammar, GrammarKind, Reasoning
from engine.sampling import SamplingParams
from protos import generation_pb2 as pb

_COLLECTIONS = (
    "logit_bias",
    "allowed_token_ids",
    "stop",
    "stop_token_ids",
    "grammar",
    "reasoning",
)
_DEFAULTS = {
    f.name: f.default
    for f in fields(SamplingParams)
    if f.name not in _COLLECTIONS and f.default is not MISSING
}


def _decode_grammar(message: pb.Grammar) -> Grammar:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise RequestError("grammar", "is of no known kind")
    return Grammar(GrammarKind(kind), getattr(message, kind))


def _decode_reasoning(message: pb.Reasoning) -> Reasoning:
    others = (message.start, message.then, message.instead)
    return Reasoning(message.end, *map(tuple, others))


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "logit_bias": dict,
    "allowed_token_ids": lambda message: tuple(message.token_ids),
    "stop": tuple,
    "stop_token_ids": tuple,
    "grammar": _decode_grammar,
    "reasoning": _decode_reasoning,
}


def encode_params(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(logit_bias=params.logit_bias, stop_token_ids=params.stop_token_ids)
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.CopyFrom(pb.TokenSet(token_ids=params.allowed_token_ids))
    if params.grammar is not None:
        setattr(message.grammar, params.grammar.kind, params.grammar.text)
    if params.reasoning is not None:
        message.reasoning.CopyFrom(pb.Reasoning(**asdict(params.reasoning)))
    try:
        message.stop.extend(params.stop)
    except UnicodeEncodeError:
        raise RequestError("stop", "must be texts of whole characters") from None
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value != default:
            _set(message, name, value)
    return message


def decode_params(message: pb.SamplingParams) -> SamplingParams:
    values = {}
    for field, value in message.ListFields():
        read = _READERS.get(field.name)
        values[field.name] = value if read is None else read(value)
    return SamplingParams(**values)


def _set(message: pb.SamplingParams, name: str, value: object) -> None:
    """Counts have no upper bound as parameters, but have one here."""
    try:
        setattr(message, name, value)
    except ValueError:
        raise RequestError(name, f"too large, must be at most {2**32 - 1}") from None
