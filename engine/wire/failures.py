"""The engine's errors as Failures, and what a peer's Failure means to whoever waits for it."""

from engine.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestError,
    StepError,
    UnavailableError,
)
from protos.generation_pb2 import Failure
from protos.limits import shortened


def encode_failure(error: EngineError) -> Failure:
    match error:
        case RequestError():
            return _failure(
                Failure.KIND_INVALID, str(error).removeprefix(f"{error.field}: "), error.field
            )
        case QueueFullError():
            return _failure(Failure.KIND_BUSY, str(error))
        case UnavailableError():
            return _failure(Failure.KIND_UNAVAILABLE, str(error), detail=error.detail)
        case DeadlineError():
            return _failure(Failure.KIND_TIMED_OUT, str(error))
        case _:
            return _failure(Failure.KIND_INTERNAL, str(error))


def decode_failure(failure: Failure) -> EngineError:
    """A worker that does not fit, or forgot, is one that cannot serve this: another may."""
    field = shortened(failure.field)
    message = shortened(failure.message) or "no reason was given"
    named = f"{field}: {message}" if field else message
    match failure.kind:
        case Failure.KIND_INVALID:
            return RequestError(field or "request", message)
        case Failure.KIND_BUSY:
            return QueueFullError(named)
        case Failure.KIND_UNAVAILABLE | Failure.KIND_INCOMPATIBLE | Failure.KIND_STALE:
            return UnavailableError(named, shortened(failure.detail))
        case Failure.KIND_TIMED_OUT:
            return DeadlineError(named)
        case _:
            return StepError(named)


def _failure(
    kind: Failure.Kind.ValueType, message: str, field: str = "", detail: str = ""
) -> Failure:
    """Readable whatever is in it: a message may quote what was sent."""
    return Failure(kind=kind, field=_text(field), message=_text(message), detail=_text(detail))


def _text(text: str) -> str:
    return shortened(text).encode(errors="backslashreplace").decode()
