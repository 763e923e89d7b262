"""A connector whose reads end when a test says so, as a device's do that has lost its way."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kv_transfer.connector import Connector, PeerPool, PoolRegion, Read

Open = Callable[..., Awaitable[Connector]]


class HeldUpRead:
    """Copies no earlier than it is told to, wanted or not."""

    def __init__(self, start: Callable[[], Read], num_bytes: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_bytes = num_bytes
        self.given_up = False
        self._start = start

    def give_up(self) -> None:
        self.given_up = True

    async def finish(self) -> None:
        await self._start().ended
        self.ended.set_result(None)


class HeldUp:
    """Stands before a worker's connectors; while `holding`, their reads wait in `reads`."""

    def __init__(self, open_connector: Open) -> None:
        self._open = open_connector
        self.holding = False
        self.reads: list[HeldUpRead] = []

    async def open(
        self, name: str, regions: Sequence[PoolRegion], incarnation: int, *rest: Any
    ) -> "HeldUpConnector":
        return HeldUpConnector(self, await self._open(name, regions, incarnation, *rest))

    async def finish(self) -> None:
        self.holding = False
        reads, self.reads = self.reads, []
        for read in reads:
            await read.finish()


class HeldUpConnector:
    def __init__(self, gate: HeldUp, inner: Connector) -> None:
        self._gate = gate
        self._inner = inner
        self.name = inner.name
        self.metadata = inner.metadata
        self.expect_peer = inner.expect_peer
        self.problem = inner.problem
        self.close = inner.close

    async def connect(self, incarnation: int, metadata: bytes) -> "HeldUpPeer":
        return HeldUpPeer(self._gate, await self._inner.connect(incarnation, metadata))


class HeldUpPeer:
    transport = "held up"

    def __init__(self, gate: HeldUp, inner: PeerPool) -> None:
        self._gate = gate
        self._inner = inner

    def read(self, group: int, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Read:
        def start() -> Read:
            return self._inner.read(group, remote_blocks, local_blocks)

        if not self._gate.holding:
            return start()
        read = HeldUpRead(start, 0)
        self._gate.reads.append(read)
        return read

    def disconnect(self) -> None:
        """What was held up may still come: as over a device that nobody can call back."""
