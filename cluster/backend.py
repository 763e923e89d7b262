"""What the HTTP side needs of an engine, wherever that runs."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from engine.errors import QueueFullError, UnavailableError
from engine.generation_stream import GenerationStream
from engine.request import GenerationRequest
from router.ask import Placement
from router.workers import Leg


class RefusedError(QueueFullError):
    """By who chooses the workers, and counts whom it refuses: no worker has heard of it."""


def nobody(leg: Leg) -> UnavailableError:
    return UnavailableError(f"no {leg} worker answers")


Submit = Callable[[GenerationRequest], GenerationStream]


class Backend(Protocol):
    """Takes requests on the event loop's thread; knows nothing of text or HTTP."""

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Never blocks and never raises for the request's sake: a refusal (`RequestError`,
        `QueueFullError`, `UnavailableError`) comes from the stream's first update."""
        ...

    def check_health(self) -> None:
        """Raises `UnavailableError`, with the reason, when nothing can be generated any more."""
        ...


@runtime_checkable
class Refusing(Protocol):
    """A backend that knows when it would refuse whatever a caller asked."""

    def check_open(self, caller: str) -> None:
        """Raises `RefusedError` then: a request need not be read to be refused."""
        ...


@runtime_checkable
class Pooled(Protocol):
    """A backend whose workers are in pools."""

    @property
    def hands_over(self) -> bool:
        """A prefill worker is there, and `submit_through` has it compute the prompt."""
        ...

    def submit_through(self, request: GenerationRequest) -> GenerationStream:
        """As `submit`, through every pool that has a worker, wherever it would be sooner."""
        ...


class Routed:
    """What a stream that somebody finds a worker for has besides. A class and no protocol: each
    request asks for it, which takes microseconds where attributes are compared."""

    routed_s: float  # from its submission until a worker had it
    num_moves: int  # from one worker to another
    placement: Placement | None  # the last one
