"""SamplingParams, field by field: absent ones have their defaults on both sides."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from engine.errors import RequestError
from engine.grammar.value import Grammar, GrammarKind, Reasoning, Tokens
from engine.sampling import SamplingParams
from protos import generation_pb2 as pb

_COLLECTIONS = (
    "logit_bias",
    "allowed_token_ids",
    "stop",
    "stop_token_ids",
    "grammar",
    "reasoning",
    "exits",
    "entries",
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
    return Reasoning(
        message.end,
        tuple(message.start),
        tuple(message.then),
        tuple(message.instead),
        _decode_marks(message.exits),
    )


def _decode_marks(messages: Iterable[pb.Tokens]) -> tuple[Tokens, ...]:
    return tuple(tuple(message.token_ids) for message in messages)


def _encode_marks(marks: Iterable[Tokens]) -> Iterator[pb.Tokens]:
    return (pb.Tokens(token_ids=tokens) for tokens in marks)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "logit_bias": dict,
    "allowed_token_ids": lambda message: tuple(message.token_ids),
    "stop": tuple,
    "stop_token_ids": tuple,
    "grammar": _decode_grammar,
    "reasoning": _decode_reasoning,
    "exits": _decode_marks,
    "entries": _decode_marks,
}


def encode_params(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(logit_bias=params.logit_bias, stop_token_ids=params.stop_token_ids)
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.CopyFrom(pb.Tokens(token_ids=params.allowed_token_ids))
    if params.grammar is not None:
        setattr(message.grammar, params.grammar.kind, params.grammar.text)
    if params.reasoning is not None:
        said = params.reasoning
        message.reasoning.CopyFrom(
            pb.Reasoning(
                start=said.start,
                end=said.end,
                then=said.then,
                instead=said.instead,
                exits=_encode_marks(said.exits),
            )
        )
    message.exits.extend(_encode_marks(params.exits))
    message.entries.extend(_encode_marks(params.entries))
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
