"""Requests answered by one engine alone, prompts included."""

from collections.abc import Callable

from decode_worker.answerer import AnswerStream, LocalPrefill, SubmittedRequest
from engine.async_engine import AsyncEngine
from engine.errors import EngineError, UnavailableError
from engine.request import GenerationUpdate


class RefusedStream:
    """Says why there is no answer, once."""

    def __init__(self, error: EngineError) -> None:
        self._error: EngineError | None = error

    def listen(self, on_news: Callable[[], None]) -> None:
        pass

    def take(self) -> GenerationUpdate | None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    @property
    def has_ended(self) -> bool:
        return self._error is None

    def stop_choice(self, choice: int) -> None:
        pass

    def close(self) -> None:
        self._error = None


class LocalAnswerer:
    """Needs nobody else, so candidates and sources make no difference."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def submit(self, submitted: SubmittedRequest) -> AnswerStream:
        if submitted.route.local_prefill is LocalPrefill.NEVER:
            return RefusedStream(UnavailableError("this worker computes every prompt itself"))
        return self._engine.submit(submitted.request)
