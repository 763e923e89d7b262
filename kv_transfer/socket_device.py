"""Blobs between a socket and a GPU's pool, by way of pinned memory."""

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kv_transfer.block_pairs import Blocks, runs
from kv_transfer.carrier import End
from kv_transfer.connector import PoolRegion
from kv_transfer.device_memory import device_blobs, device_of
from kv_transfer.errors import ConnectorUnavailable
from kv_transfer.socket_memory import receive_views, send_views

SLICE_BYTES = 4 << 20  # that are copied at once, or one blob
_BUFFERS = 2  # one is copied while the other is on the connection

Wait = Callable[[], object]


class Copies(Protocol):
    """Between a GPU's blobs and host memory. Each is begun, and done when its `Wait` returns."""

    def buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of host memory."""
        ...

    def fetch(self, group: int, blocks: Blocks, into: Tensor) -> Wait: ...

    def store(self, group: int, blocks: Blocks, source: Tensor) -> Wait: ...


class CudaCopies:
    """On a stream of its own, so that no copy waits for a step of the engine's."""

    def __init__(self, regions: Sequence[PoolRegion]) -> None:
        self._blobs = device_blobs(regions)
        self._stream = torch.cuda.Stream(device_of(regions))  # type: ignore[no-untyped-call]

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, group: int, blocks: Blocks, into: Tensor) -> Wait:
        return self._begin([(host, blobs) for blobs, host in self._runs(group, blocks, into)])

    def store(self, group: int, blocks: Blocks, source: Tensor) -> Wait:
        return self._begin(self._runs(group, blocks, source))

    def _runs(self, group: int, blocks: Blocks, host: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Neighbours' blobs, and their place in host memory."""
        blobs, pairs, start = self._blobs[group], [], 0
        for first, count in runs(blocks):
            there = blobs[first : first + count].view(-1)
            pairs.append((there, host[start : start + there.numel()]))
            start += there.numel()
        return pairs

    def _begin(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Wait:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return done.synchronize


class DevicePool:
    """A GPU's pool, to be sent and received; every connection has buffers and a stream."""

    transport = "tcp"

    def __init__(
        self,
        regions: Sequence[PoolRegion],
        copies: Callable[[Sequence[PoolRegion]], Copies] = CudaCopies,
    ) -> None:
        kinds = {(region.memory, region.device) for region in regions}
        if len(kinds) != 1:
            raise ConnectorUnavailable(f"memory: {sorted(kinds)}, sockets move one kind")
        if regions[0].memory == "cuda" and not torch.cuda.is_available():
            raise ConnectorUnavailable("memory: 'cuda', torch finds no GPU")
        self.regions = tuple(regions)
        self._copies = copies

    def carry(self, sock: socket.socket, end: End) -> "DeviceCarrier":
        return DeviceCarrier(self.regions, self._copies(self.regions), sock)


class DeviceCarrier:
    """The connection itself carries the blobs; buffers live as long as a request."""

    def __init__(self, regions: Sequence[PoolRegion], copies: Copies, sock: socket.socket) -> None:
        self._blob_bytes = [region.blob_bytes for region in regions]
        self._copies = copies
        self._sock = sock

    def send(self, group: int, blocks: Blocks) -> None:
        places = self._places(group, blocks)
        waits: list[Wait] = []
        try:
            for turn, (_, buffer) in enumerate(places):
                for part, ahead in places[len(waits) : turn + _BUFFERS]:
                    waits.append(self._copies.fetch(group, part, ahead))
                waits[turn]()
                send_views(self._sock, [buffer.numpy().data])
        finally:
            _all(waits)  # the reader may be gone, and with it the holds of what is copied

    def receive(self, group: int, blocks: Blocks, stopped: Callable[[], bool]) -> None:
        waits: list[Wait] = []
        try:
            for turn, (part, buffer) in enumerate(self._places(group, blocks)):
                if turn >= _BUFFERS:
                    waits[turn - _BUFFERS]()
                receive_views(self._sock, [buffer.numpy().data], stopped)
                waits.append(self._copies.store(group, part, buffer))
        finally:
            _all(waits)

    def close(self) -> None:
        pass  # there is only the connection

    def _places(self, group: int, blocks: Blocks) -> list[tuple[Blocks, Tensor]]:
        """Slices of the blocks, and where each is on the host: every second in the same place."""
        size = self._blob_bytes[group]
        step = max(1, SLICE_BYTES // size)
        parts = [blocks[start : start + step] for start in range(0, len(blocks), step)]
        buffers = [self._copies.buffer(len(part) * size) for part in parts[:_BUFFERS]]
        return [
            (part, buffers[turn % _BUFFERS][: len(part) * size]) for turn, part in enumerate(parts)
        ]


def _all(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()
