"""Requests answered by one engine alone, prompts included."""

from typing import Self

from decode_worker.answerer import LocalPrefill, SubmittedRequest
from engine.async_engine import AsyncEngine
from engine.errors import EngineError, UnavailableError
from engine.generation_stream import GenerationStream
from engine.request import GenerationUpdate


class RefusedStream:
    """Says why there is no answer, once."""

    def __init__(self, error: EngineError) -> None:
        self._error: EngineError | None = error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationUpdate:
        error, self._error = self._error, None
        raise error or StopAsyncIteration

    def stop_choice(self, choice: int) -> None:
        pass

    def close(self) -> None:
        self._error = None


class LocalAnswerer:
    """Needs nobody else, so candidates and sources make no difference."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def submit(self, submitted: SubmittedRequest) -> GenerationStream:
        if submitted.route.local_prefill is LocalPrefill.NEVER:
            return RefusedStream(UnavailableError("this worker computes every prompt itself"))
        return self._engine.submit(submitted.request)
