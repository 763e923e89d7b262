"""A backend whose requests are observed as they go by."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from cluster.backend import Backend, Routed
from cluster.metrics.record import Origin, RequestRecord
from cluster.metrics.requests import RequestMetrics
from engine.generation_stream import GenerationStream
from engine.request import GenerationRequest, GenerationUpdate


class ObservedBackend:
    """Submits the prompts of one HTTP request."""

    def __init__(self, backend: Backend, origin: Origin, metrics: RequestMetrics) -> None:
        self._backend = backend
        self._origin = origin
        self._metrics = metrics
        self._records: list[RequestRecord] = []

    def submit(self, request: GenerationRequest) -> ObservedStream:
        waited_s = time.monotonic() - self._origin.arrived_s
        record = RequestRecord(request, self._origin, self._metrics)
        self._records.append(record)
        return ObservedStream(self._backend.submit(request), record, self.fail, waited_s)

    def fail(self, error: Exception) -> None:
        """All are closed then: nobody has left, nor was out of time."""
        for record in self._records:
            record.fail(error)


class ObservedStream:
    def __init__(
        self,
        stream: GenerationStream,
        record: RequestRecord,
        fail: Callable[[Exception], None],
        waited_s: float,
    ) -> None:
        self._stream = stream
        self._routed = stream if isinstance(stream, Routed) else None
        self._record = record
        self._fail = fail
        self._waited_s = waited_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationUpdate:
        try:
            update = await anext(self._stream)
        except StopAsyncIteration:
            raise
        except Exception as error:
            self._fail(error)
            raise
        routed_s = 0.0 if self._routed is None else self._routed.routed_s
        self._record.note(update, time.monotonic(), self._waited_s + routed_s)
        return update

    def stop_choice(self, choice: int) -> None:
        self._record.stop(choice)
        self._stream.stop_choice(choice)

    def close(self) -> None:
        self._stream.close()
        if self._routed is not None:
            self._record.note_route(self._routed.num_moves, self._routed.placement)
        self._record.end(time.monotonic())
