"""What the HTTP side needs of an engine, wherever that runs."""

from typing import Protocol

from engine.generation_stream import GenerationStream
from engine.request import GenerationRequest


class Backend(Protocol):
    """Takes requests on the event loop's thread; knows nothing of text or HTTP."""

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Never blocks and never raises for the request's sake: a refusal (`RequestError`,
        `QueueFullError`, `UnavailableError`) comes from the stream's first update."""
        ...

    def check_health(self) -> None:
        """Raises `UnavailableError`, with the reason, when nothing can be generated any more."""
        ...
