"""GenerationRequest as the part of a Submit that an engine needs to know.

Its `hand_over` and `fetch_above` do not travel: they are decided by whoever has the engine.
"""

import math
from collections.abc import Sequence
from operator import index

from engine.errors import RequestError
from engine.request import ChoiceSoFar, GenerationRequest, RequestId
from engine.wire.params import decode_params, encode_params
from protos import session_pb2 as pb

MAX_ID_CHARS = 256
_MAX_UINT32 = 2**32 - 1


def encode_request(request: GenerationRequest) -> pb.Submit:
    """RequestError for what no message can say."""
    check_request_id(request.request_id)
    message = pb.Submit(
        params=encode_params(request.params), timeout_ms=_milliseconds(request.timeout_s)
    )
    try:
        message.request_id = request.request_id
        message.cache_salt = request.cache_salt
    except (TypeError, UnicodeEncodeError):
        raise RequestError("cache_salt", "must be a text of whole characters") from None
    message.token_ids.extend(_token_ids("prompt", request.prompt_token_ids))
    for choice in request.sent:
        token_ids = _token_ids("sent", choice.token_ids)
        message.choices.add(token_ids=token_ids, finished=choice.finished)
    try:
        message.priority = request.priority
    except (TypeError, ValueError):
        bound = f"{-(2**31)}..{2**31 - 1}"
        raise RequestError("priority", f"must be an integer in {bound}") from None
    return message


def decode_request(message: pb.Submit, own_id: RequestId | None = None) -> GenerationRequest:
    """`own_id`: the request's here, in place of the sender's."""
    check_request_id(message.request_id)
    params = decode_params(message.params)
    if len(message.choices) not in (0, params.n):
        raise RequestError("sent", f"{len(message.choices)} choices, must be none or {params.n}")
    return GenerationRequest(
        request_id=own_id or RequestId(message.request_id),
        prompt_token_ids=list(message.token_ids),
        params=params,
        priority=message.priority,
        cache_salt=message.cache_salt,
        timeout_s=message.timeout_ms / 1000 if message.timeout_ms else None,
        sent=tuple(ChoiceSoFar(list(c.token_ids), c.finished) for c in message.choices),
    )


def check_request_id(request_id: str) -> None:
    if not 0 < len(request_id) <= MAX_ID_CHARS:
        raise RequestError(
            "request_id", f"{len(request_id)} characters, must be 1 to {MAX_ID_CHARS}"
        )
    if not request_id.isprintable():
        raise RequestError("request_id", f"{request_id!r}, must be printable")


def _token_ids(field: str, token_ids: Sequence[int]) -> list[int]:
    """As integers of the wire."""
    try:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) <= _MAX_UINT32):
            return [index(token) for token in token_ids]
    except TypeError:
        pass
    raise RequestError(field, f"token ids must be integers in 0..{_MAX_UINT32}")


def _milliseconds(timeout_s: float | None) -> int:
    """0 says that there is none, so the shortest is a millisecond. Never less than asked for,
    the error of binary fractions apart."""
    if timeout_s is None or timeout_s == math.inf:
        return 0
    if not timeout_s > 0:
        raise RequestError("timeout_s", f"{timeout_s}, must be above 0")
    return min(_MAX_UINT32, max(1, math.ceil(round(timeout_s * 1000, 6))))
