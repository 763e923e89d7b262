"""Pools read over NIXL: RDMA, NVLink, or the same host's memory."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self

from kv_transfer import nixl
from kv_transfer.block_pairs import BlockPairs
from kv_transfer.connector import PoolRegion, Read
from kv_transfer.errors import LinkLost, OneSidedRefused, TransferError
from kv_transfer.faults import Faults
from kv_transfer.nixl_lane import MAX_POST_BYTES, Lane, Piece, SharedPeer
from kv_transfer.piece_read import Backlog, PieceRead, failed_read
from kv_transfer.pool_description import PoolDescription
from kv_transfer.probe import first_read

NAME = "nixl"
_MIN_PIECE_BYTES = 2 << 20  # below it a second lane gains nothing
_LANE_PERIOD_S = 0.1  # of lanes that nobody connects to
_HURRY_S = 2.0  # for whoever has got our metadata
_CONNECT_S = 10.0  # it takes 10 ms
_HOST_BYTES = 16


@dataclass(frozen=True)
class NixlConfig:
    """`lanes`: agents that read side by side, each on a thread of its own while it copies; over
    CMA one thread copies at half of a memcpy's rate. On a single core two take as long as one, and
    a READ that holds up its thread leaves the others one.

    A peer's first READ with an agent takes up to five of the holder's periods, then none: so the
    holder polls seldom, but after it was asked for its metadata.
    """

    lanes: int = 2
    beyond_host: bool = True  # or else peers on other hosts are left to another connector
    idle_period_s: float = 0.050  # half a percent of a core; 2 % at 10 ms
    hurried_period_s: float = 0.001


class NixlConnector:
    """Our pool, registered with one agent that peers read from and some that read from peers."""

    name = NAME

    def __init__(
        self,
        regions: Sequence[PoolRegion],
        incarnation: int,
        secret: bytes,
        config: NixlConfig,
        faults: Faults,
    ) -> None:
        """Loads nixl and starts the threads; `open` waits for them."""
        nixl.prepare_environment()
        self._regions = tuple(regions)
        self._incarnation = incarnation
        self._secret = secret
        self._config = config
        self._backlog: Backlog[Piece] = Backlog()
        periods = [config.idle_period_s] + [_LANE_PERIOD_S] * (config.lanes - 1)
        self._lanes = [
            Lane(f"nixl-lane-{i}", regions, self._backlog, period, faults)
            for i, period in enumerate(periods)
        ]
        self._agent = b""

    @classmethod
    async def open(
        cls,
        regions: Sequence[PoolRegion],
        incarnation: int,
        secret: bytes = b"",
        config: NixlConfig | None = None,
        faults: Faults | None = None,
    ) -> Self:
        connector = cls(regions, incarnation, secret, config or NixlConfig(), faults or Faults())
        agents = [asyncio.wrap_future(lane.metadata) for lane in connector._lanes]
        try:
            connector._agent, *_ = await asyncio.gather(*agents)
        except BaseException:
            await connector.close()
            raise
        return connector

    def metadata(self) -> bytes:
        payload = _host() + self._agent
        description = PoolDescription(NAME, self._incarnation, self._regions, payload)
        return description.encode(self._secret)

    async def connect(self, incarnation: int, metadata: bytes) -> "NixlPeer":
        description = PoolDescription.decode(metadata, NAME, self._secret)
        description.check_fits(self._regions, incarnation)
        if description.payload[:_HOST_BYTES] != _host() and not self._config.beyond_host:
            raise OneSidedRefused("on another host, where nixl would encrypt nothing")
        peer, was_there = await self._add(description)
        try:
            if was_there:
                await first_read(peer)
            return peer
        except BaseException as e:
            peer.disconnect()
            if not isinstance(e, TransferError) or peer.is_read:
                raise
        peer, _ = await self._add(description, anew=True)
        return peer

    async def _add(
        self, description: PoolDescription, anew: bool = False
    ) -> tuple["NixlPeer", bool]:
        """The peer, and whether over connections that were there, which may have failed since
        they were used."""
        host, agent = description.payload[:_HOST_BYTES], description.payload[_HOST_BYTES:]
        shared = SharedPeer(agent, description.regions, anew)
        added = [asyncio.wrap_future(lane.add_peer(shared)) for lane in self._lanes]
        try:
            async with asyncio.timeout(_CONNECT_S):
                were_there = await asyncio.gather(*added)
        except TimeoutError as e:
            self.remove(shared)
            raise TransferError("nixl is busy, or has failed") from e
        except BaseException:
            self.remove(shared)
            raise
        transport = "ucx on one host" if host == _host() else "ucx"
        return NixlPeer(self, shared, transport), any(were_there)

    def expect_peer(self) -> None:
        self._lanes[0].hurry(self._config.hurried_period_s, _HURRY_S)

    def problem(self) -> str | None:
        return (
            "a thread of nixl's has failed" if any(lane.is_dead for lane in self._lanes) else None
        )

    async def close(self) -> None:
        self._backlog.close()
        for lane in self._lanes:
            lane.close()
        for lane in self._lanes:
            await asyncio.to_thread(lane.join)

    @property
    def regions(self) -> tuple[PoolRegion, ...]:
        return self._regions

    def begin(self, read: PieceRead[Piece]) -> None:
        self._backlog.put(read)
        for lane in self._lanes:
            lane.wake()

    def pieces(self, peer: SharedPeer, pairs: BlockPairs) -> list[Piece]:
        """Each lane has its share of a read, in posts of at most 32 MiB.

        Of a peer's first read each reads the first block besides: its connection takes the holder's
        help, which may not be had any more when it has a share of a later one."""
        share = -(-pairs.num_bytes // len(self._lanes))
        size = min(MAX_POST_BYTES, max(_MIN_PIECE_BYTES, share))
        shares = [Piece(peer, piece) for piece in pairs.pieces(size)]
        if peer.was_read or not shares or len(self._lanes) == 1:
            return shares
        first = pairs.pieces(1)[0]
        return [*(Piece(peer, first, lane) for lane in self._lanes), *shares]

    def remove(self, peer: SharedPeer) -> None:
        for lane in self._lanes:
            lane.remove_peer(peer)


class NixlPeer:
    """A peer's pool; forgotten once it is disconnected and its last read has ended."""

    def __init__(self, connector: NixlConnector, shared: SharedPeer, transport: str) -> None:
        self.transport = transport
        self._connector = connector
        self._shared = shared
        self._connected = True
        self._num_reads = 0

    def read(self, group: int, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Read:
        if not self._connected:
            return failed_read(LinkLost("disconnected"))
        try:
            pairs = BlockPairs.checked(
                self._connector.regions, self._shared.regions, group, remote_blocks, local_blocks
            )
        except TransferError as e:
            return failed_read(e)
        pieces = self._connector.pieces(self._shared, pairs)
        read = PieceRead(pieces, pairs.num_bytes, self._on_end)
        if pieces:
            self._num_reads += 1
            self._connector.begin(read)
        return read

    @property
    def is_read(self) -> bool:
        """A read of it has not ended."""
        return self._num_reads > 0

    def disconnect(self) -> None:
        if self._connected:
            self._connected = False
            self._remove_if_unused()

    def _on_end(self, _: PieceRead[Piece]) -> None:
        self._num_reads -= 1
        self._remove_if_unused()

    def _remove_if_unused(self) -> None:
        if not self._connected and not self._num_reads:
            self._connector.remove(self._shared)


def _host() -> bytes:
    """Equal in processes that may read each other's memory: one kernel, one PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return blake2b(
        boot + os.readlink("/proc/self/ns/pid").encode(), digest_size=_HOST_BYTES
    ).digest()
