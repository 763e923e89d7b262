"""What a worker says of its cache, on a way that loses, swaps, doubles and changes some of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc.aio

from protos.events_pb2 import WorkerEvent
from protos.rpc import Plane

METHOD = "/kvrelay.v1.WorkerEvents/Subscribe"
EVERY = 7  # batches, of which one is garbled
FAULTS = ("doubled", "swapped", "changed", "lost", "cut")


@dataclass
class Garbler:
    """Of one worker's streams; each fault once, in turn."""

    counts: Counter[str] = field(default_factory=Counter)
    _num_batches: int = 0

    @property
    def is_done(self) -> bool:
        return self.counts.total() == len(FAULTS)

    async def read(self, events: AsyncIterator[WorkerEvent]) -> AsyncIterator[WorkerEvent]:
        late: list[WorkerEvent] = []
        async for event in events:
            fault = self._fault_of(event)
            if fault == "cut":
                return
            if fault == "swapped":
                late.append(event)
                continue
            if fault == "changed":
                del event.batch.events[-1]
            if fault != "lost":
                yield event
            if fault == "doubled":
                yield event
            while late and event.WhichOneof("kind") == "batch":
                yield late.pop()

    def _fault_of(self, event: WorkerEvent) -> str:
        if self.is_done or event.WhichOneof("kind") != "batch" or not event.batch.events:
            return ""
        self._num_batches += 1
        if self._num_batches % EVERY:
            return ""
        fault = FAULTS[self.counts.total()]
        self.counts[fault] += 1
        return fault


@dataclass(frozen=True, slots=True)
class GarblingPlane(Plane):
    """Its channels garble what comes over the events' stream, and nothing else."""

    garblers: dict[str, Garbler] = field(default_factory=dict)  # by address

    def channel(self, address: str) -> grpc.aio.Channel:
        garbler = self.garblers.setdefault(address, Garbler())
        return cast(grpc.aio.Channel, _Channel(Plane.channel(self, address), garbler))


class _Channel:
    def __init__(self, channel: grpc.aio.Channel, garbler: Garbler) -> None:
        self._channel = channel
        self._garbler = garbler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Callable[..., Any]:
        start = self._channel.unary_stream(method, *arguments, **options)
        if method != METHOD:
            return start
        return lambda request: _Call(start(request), self._garbler)


class _Call:
    def __init__(self, call: Any, garbler: Garbler) -> None:
        self._call = call
        self._garbler = garbler

    def __aiter__(self) -> AsyncIterator[WorkerEvent]:
        return self._garbler.read(self._call)

    def cancel(self) -> None:
        self._call.cancel()
