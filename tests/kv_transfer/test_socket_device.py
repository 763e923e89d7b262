"""A GPU's pool over TCP, with copies that are made as late as may be; on a card with its own."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kv_cache.events import new_incarnation
from kv_transfer import socket_device
from kv_transfer.block_pairs import Blocks
from kv_transfer.carrier import End
from kv_transfer.connector import PoolRegion
from kv_transfer.socket_connector import SocketConfig, SocketConnector
from kv_transfer.socket_device import DeviceCarrier, DevicePool, Wait
from tests.kv_transfer.children import child
from tests.kv_transfer.pools import GROUPS, Pool


class LateCopies:
    """In the order in which they were begun, as on a stream, but none before somebody waits."""

    def __init__(self, pool: Pool) -> None:
        self._blobs = pool.blobs
        self._begun: list[tuple[NDArray[np.uint8], Blocks, torch.Tensor, bool]] = []
        self.num_done = 0

    @property
    def num_left(self) -> int:
        return len(self._begun) - self.num_done

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def fetch(self, group: int, blocks: Blocks, into: torch.Tensor) -> Wait:
        return self._begin(group, blocks, into, True)

    def store(self, group: int, blocks: Blocks, source: torch.Tensor) -> Wait:
        return self._begin(group, blocks, source, False)

    def _begin(self, group: int, blocks: Blocks, host: torch.Tensor, fetches: bool) -> Wait:
        self._begun.append((self._blobs[group], blocks, host, fetches))
        number = len(self._begun)
        return lambda: self._reach(number)

    def _reach(self, number: int) -> None:
        for blobs, blocks, host, fetches in self._begun[self.num_done : number]:
            rows = host.numpy().reshape(len(blocks), -1)
            if fetches:
                rows[:] = blobs[blocks]
            else:
                blobs[blocks] = rows
            self.num_done += 1


class Side:
    def __init__(self, seed: int | None) -> None:
        self.pool = Pool(seed=seed)
        self.copies: list[LateCopies] = []
        self.incarnation = new_incarnation()
        regions = self.pool.regions
        pool = DevicePool(regions, self._make)
        self.connector = SocketConnector(regions, self.incarnation, b"", SocketConfig(), pool)

    def _make(self, regions: Sequence[PoolRegion]) -> LateCopies:
        self.copies.append(LateCopies(self.pool))
        return self.copies[-1]


@pytest.fixture
async def sides(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Side, Side]]:
    """A reader whose blobs are 0, and a holder: slices of three blobs, or of one."""
    monkeypatch.setattr(socket_device, "SLICE_BYTES", 3 * GROUPS[0][1])
    reader, holder = Side(None), Side(1)
    yield reader, holder
    await reader.connector.close()
    await holder.connector.close()


async def test_blobs_go_through_buffers_that_are_used_again(sides: tuple[Side, Side]) -> None:
    reader, holder = sides
    peer = await reader.connector.connect(holder.incarnation, holder.connector.metadata())
    rng = np.random.default_rng(3)
    for group, (num_blocks, _) in enumerate(GROUPS):
        remote, local = rng.permutation(num_blocks), rng.permutation(num_blocks)
        want = reader.pool.blobs[group].copy()
        want[local[:-2]] = holder.pool.blobs[group][remote[:-2]]
        await peer.read(group, remote[:-2].tolist(), local[:-2].tolist()).ended
        assert np.array_equal(reader.pool.blobs[group], want)
    for side in sides:
        assert sum(copies.num_done for copies in side.copies) > 0
        assert all(copies.num_left == 0 for copies in side.copies)


def test_nothing_is_on_its_way_when_a_connection_has_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks may be somebody else's then."""
    num_blocks, blob_bytes = GROUPS[0]
    monkeypatch.setattr(socket_device, "SLICE_BYTES", blob_bytes)
    blocks = np.arange(num_blocks, dtype=np.int32)
    for end in End:
        ours, theirs = socket.socketpair()
        pool = Pool(seed=2)
        copies = LateCopies(pool)
        carrier = DeviceCarrier(pool.regions, copies, ours)
        with ours:
            theirs.sendall(bytes(3 * blob_bytes // 2))
            theirs.close()
            act = carrier.send if end is End.HOLDER else partial(carrier.receive, stopped=bool)
            with pytest.raises(OSError, match=r"closed|reset|pipe"):
                act(0, blocks)
        assert copies.num_done > 0
        assert copies.num_left == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of a GPU's memory")
def test_blobs_of_a_gpu_come_from_another_process() -> None:
    asyncio.run(read_on_a_gpu())


async def read_on_a_gpu() -> None:
    """In processes that are not forked: a GPU machine has too little for that."""
    groups = ((96, 1 << 20), (40, 12288))
    async with (
        child("socket", 1, groups=groups, memory="cuda", prefix=("env",)) as holder,
        child("socket", groups=groups, memory="cuda", prefix=("env",)) as reader,
    ):
        peer = await reader.connect(holder)
        rng = np.random.default_rng(4)
        for group, (num_blocks, _) in enumerate(groups):
            remote, local = rng.permutation(num_blocks).tolist(), list(range(num_blocks))
            await reader.ask("read", peer, group, remote, local)
            theirs = await holder.ask("blob_sums", group)
            assert await reader.ask("blob_sums", group) == [theirs[block] for block in remote]
