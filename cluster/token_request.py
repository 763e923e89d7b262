"""What a gRPC client asks for: checked, and completed with what it left unsaid.

Reads nothing but its arguments. Fields stand by their names in protos/ingress.proto.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.drawn import draw_seed
from cluster.openai.completion_request import DEFAULT_MAX_TOKENS
from cluster.openai.request_limits import (
    MAX_SALT_CHARS,
    NOT_IN_SALTS,
    RequestLimits,
    check_num_logprobs,
)
from cluster.served_model import ServedModel, no_room, too_long
from engine.errors import RequestError
from engine.generation_defaults import RECOMMENDED, GenerationDefaults
from engine.sampling import SamplingParams
from engine.wire.params import decode_params
from protos import generation_pb2
from protos.ingress_pb2 import GenerateRequest


@dataclass(frozen=True, slots=True)
class TokenRequest:
    token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    timeout_s: float


def read_request(
    message: GenerateRequest, model: ServedModel, limits: RequestLimits, longest_s: float
) -> TokenRequest:
    """ApiError or RequestError names the field that is wrong."""
    model.check_name(message.model or None)
    token_ids = list(message.token_ids)
    if not token_ids:
        raise RequestError("token_ids", "must hold at least one token")
    limits.check_prompt(len(token_ids), "token_ids")
    limits.check_priority(message.priority)
    room = model.max_model_len - len(token_ids)
    if room < 1:
        raise too_long("token_ids", str(len(token_ids)), model.max_model_len)
    model.check_token_ids(token_ids, "token_ids")
    params = _params(message.params, model, limits, room)
    check_num_logprobs(params, 1, len(token_ids))
    _check_salt(message.cache_salt)
    timeout_s = message.timeout_ms / 1000 if message.timeout_ms else longest_s
    return TokenRequest(
        token_ids, params, message.priority, message.cache_salt, min(timeout_s, longest_s)
    )


def _params(
    said: generation_pb2.SamplingParams, model: ServedModel, limits: RequestLimits, room: int
) -> SamplingParams:
    for name in ("stop", "include_stop_str_in_output"):
        if getattr(said, name):
            raise RequestError(name, "is for texts; stop_token_ids end an answer in token ids")
    params = decode_params(_completed(said, model.defaults, room)).without_repeats()
    limits.check_n(params.n, 1)
    params.check_token_ids(model.vocab_size)
    if params.max_tokens is not None and params.max_tokens > room:
        raise no_room("max_tokens", params.max_tokens, room, model.max_model_len)
    return params


def _completed(
    said: generation_pb2.SamplingParams, defaults: GenerationDefaults, room: int
) -> generation_pb2.SamplingParams:
    params = generation_pb2.SamplingParams()
    for name in RECOMMENDED:
        value = getattr(defaults, name)
        if value is not None:
            setattr(params, name, value)
    params.max_tokens = min(defaults.max_new_tokens or DEFAULT_MAX_TOKENS, room)
    params.seed = draw_seed()
    params.MergeFrom(said)
    return params


def _check_salt(salt: str) -> None:
    if len(salt) > MAX_SALT_CHARS or NOT_IN_SALTS.intersection(salt):
        raise RequestError(
            "cache_salt", f"must have at most {MAX_SALT_CHARS} characters, no @, /, \\ and NUL"
        )
