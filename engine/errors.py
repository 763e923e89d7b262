"""Errors that carry what was wrong and what would be right."""

from typing import NoReturn, Self


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class RequestError(EngineError):
    """A request asks for something that cannot be; `field` names the parameter."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def renamed(self, field: str) -> Self:
        """For whoever knows the parameter by another name."""
        return type(self)(field, self.message)


class UnprocessableError(RequestError):
    """Well-formed, but the model or a library can make nothing of it."""


class QueueFullError(EngineError):
    """The waiting queue is at its bound; the request may be tried again, after `retry_after_s`."""

    def __init__(self, message: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(EngineError):
    """Nothing can be generated at the moment: the engine is loading, stopping or dead. `detail` is
    for logs and for who runs the workers: it may have their addresses, which are no client's
    business."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class EngineDiedError(UnavailableError):
    """The engine ended by itself under all that it had, of which one may be the cause. It does not
    come back in this process."""


class DeadlineError(EngineError):
    """The time that the request gave itself was over before its answer was complete."""


class StepError(EngineError):
    """A step of the engine failed, and the request with it."""


class ConfigError(EngineError):
    """A knob of the engine has no such name or no such value; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ModelError(EngineError):
    """A model that cannot be loaded: what is missing, broken or not supported, and where."""


def in_full(error: EngineError) -> str:
    """For logs and for who runs the workers."""
    detail = error.detail if isinstance(error, UnavailableError) else ""
    return f"{error}: {detail}" if detail else str(error)


def throw(error: Exception) -> NoReturn:
    """Raises what was kept until now. Its traceback holds the frames that it passes: had one of
    them, or what they belong to, the error still, all that they hold would stay until Python next
    looks for garbage, which servers have it do seldom. So the caller has it no more either."""
    try:
        raise error
    finally:
        del error
