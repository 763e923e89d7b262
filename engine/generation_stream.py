"""How the answer to a request is read, whoever generates it."""

from typing import Protocol, Self

from engine.request import GenerationUpdate


class GenerationStream(Protocol):
    """The answer to one request, read by one task of the event loop that submitted it.

    Iteration ends when every choice has finished. Whatever keeps the request from finishing is
    raised by iteration as an `EngineError`, once. Updates that were not read yet may be merged.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> GenerationUpdate: ...

    def stop_choice(self, choice: int) -> None:
        """Nothing more is wanted of a choice (its stop string was found). It counts as finished;
        tokens of it that are under way may still arrive and are ignored. Never blocks."""
        ...

    def close(self) -> None:
        """Aborts what still runs and frees its blocks. Idempotent, never blocks; a stream must
        be closed by whoever submitted it, also after it ended."""
        ...
