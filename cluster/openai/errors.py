"""Errors in OpenAI's shape, and the one place where our errors become HTTP statuses."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestError,
    UnavailableError,
    UnprocessableError,
)

_RETRY_UNAVAILABLE_S = 5
_MAX_CHARS = 500


@dataclass
class ApiError(Exception):
    """An answer that is an error; `param` is the request's field at fault, if one is."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status} {self.message}"

    def body(self) -> bytes:
        return json.dumps({"error": self.fields()}).encode()

    def event(self) -> bytes:
        """As the last event of a stream whose headers are out."""
        return b"data: " + self.body() + b"\n\n"

    def fields(self) -> dict[str, str | None]:
        return {
            "message": _short(self.message),
            "type": self.type,
            "param": None if self.param is None else _short(self.param),
            "code": self.code,
        }


def _short(text: str) -> str:
    """Errors quote what clients send, which may be as long as a body."""
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def api_error(error: EngineError) -> ApiError:
    """What a client is told about an error of the engine."""
    match error:
        case UnprocessableError(field=name):
            return ApiError(422, str(error), param=name)
        case RequestError(field=name):
            return bad_request(name, str(error), "invalid_value")
        case QueueFullError():
            message = str(error) or "too many requests are waiting"
            headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
            return ApiError(429, message, "rate_limit_error", None, "rate_limit_exceeded", headers)
        case UnavailableError():
            message = str(error) or "nothing can be generated at the moment"
            headers = {"Retry-After": str(_RETRY_UNAVAILABLE_S)}
            return ApiError(503, message, "server_error", None, "unavailable", headers)
        case DeadlineError():
            return not_in_time(str(error))
        case _:
            return ApiError(500, str(error) or "generation failed", "server_error")


def not_in_time(message: str, timeout_s: float | None = None) -> ApiError:
    """Of an answer. OpenAI's clients would ask for all of it again, as after any 408."""
    given = "" if timeout_s is None else f" ({timeout_s:g} s)"
    return ApiError(408, message + given, "timeout_error", headers={"X-Should-Retry": "false"})


def internal_error() -> ApiError:
    """For what should not happen; what did is in the server's log."""
    return ApiError(500, "the server failed to answer this request", "server_error")
