"""Pools read over TCP: anywhere, without the holder's memory being registered anywhere."""

import asyncio
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.block_pairs import BlockPairs
from kv_transfer.carrier import CarriedPool
from kv_transfer.connector import PoolRegion, Read
from kv_transfer.errors import ConnectorUnavailable, IncompatiblePeer, LinkLost, TransferError
from kv_transfer.faults import Faults
from kv_transfer.piece_read import Backlog, PieceRead, failed_read
from kv_transfer.pool_description import PoolDescription
from kv_transfer.socket_memory import PoolBytes
from kv_transfer.socket_server import ServerLimits, SocketServer
from kv_transfer.socket_stream import Stream, Target
from kv_transfer.socket_tls import SocketTls
from kv_transfer.socket_wire import MAX_REQUEST_BLOCKS

NAME = "socket"
_MIN_PIECE_BYTES = 1 << 20
_MAX_PIECE_BYTES = 32 << 20
_JOIN_S = 0.5
_HOST = re.compile(rb"[A-Za-z0-9.:%_-]{1,255}")
_PORT = struct.Struct("<H")


@dataclass(frozen=True)
class SocketConfig:
    """`host` and `port` are listened at; `advertise` is what peers are told, `host` if None.

    Two streams a peer: on loopback they move 1.6 times what one does, and more gain little.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    streams: int = 2
    tls: SocketTls | None = None
    limits: ServerLimits = ServerLimits()


class SocketConnector:
    """A server for our pool, and streams that read those of peers.

    With a pool of another kind the blobs take another way than the connections, which ask for them.
    """

    name = NAME

    def __init__(
        self,
        regions: Sequence[PoolRegion],
        incarnation: int,
        secret: bytes,
        config: SocketConfig,
        pool: CarriedPool | None = None,
        faults: Faults | None = None,
    ) -> None:
        if config.advertise is None and config.host in ("", "0.0.0.0", "::"):
            raise ConnectorUnavailable(
                f"advertise: peers cannot connect to {config.host!r}; name this machine's address"
            )
        self._pool = pool or _pool(regions)
        self._incarnation = incarnation
        self._secret = secret
        self._config = config
        self._faults = faults or Faults()
        self._streams: list[Stream] = []
        self._backlogs: list[Backlog[BlockPairs]] = []
        try:
            self._server = SocketServer(
                self._pool,
                incarnation,
                secret,
                (config.host, config.port),
                config.tls.server if config.tls else None,
                config.limits,
            )
        except OSError as e:
            raise ConnectorUnavailable(f"cannot listen at {config.host}:{config.port}: {e}") from e

    def metadata(self) -> bytes:
        host = self._config.advertise or self._config.host
        payload = _PORT.pack(self._server.port) + host.encode()
        description = PoolDescription(self.name, self._incarnation, self._pool.regions, payload)
        return description.encode(self._secret)

    async def connect(self, incarnation: int, metadata: bytes) -> "SocketPeer":
        description = PoolDescription.decode(metadata, self.name, self._secret)
        description.check_fits(self._pool.regions, incarnation)
        _check_memory(self._pool.regions, description.regions)
        host, port = _address(description.payload)
        config = self._config
        target = Target(
            host,
            port,
            incarnation,
            self._secret,
            config.tls,
            config.limits.answer_s,
            config.limits.stall_s,
            self._faults,
        )
        backlog: Backlog[BlockPairs] = Backlog()
        streams = [Stream(target, self._pool, backlog) for _ in range(config.streams)]
        self._streams = [s for s in self._streams if s.alive] + streams
        self._backlogs.append(backlog)
        peer = SocketPeer(self._pool, description.regions, backlog, streams, self._forget)
        try:
            await peer.greet()
        except BaseException:
            peer.disconnect()
            raise
        return peer

    def expect_peer(self) -> None:
        pass  # its threads sleep until there is something to do

    def problem(self) -> str | None:
        return f"the {self.name} connector listens no more" if self._server.is_dead else None

    async def close(self) -> None:
        for backlog in self._backlogs:
            backlog.close()
        for stream in self._streams:
            stream.interrupt(None)
        for stream in self._streams:
            while stream.alive:
                stream.interrupt(None)  # again, where it had just taken a piece, or changed sockets
                await asyncio.to_thread(stream.join, _JOIN_S)
        await asyncio.to_thread(self._server.close)

    def _forget(self, backlog: Backlog[BlockPairs]) -> None:
        self._backlogs.remove(backlog)


class SocketRead(PieceRead[BlockPairs]):
    """Giving up closes the connections that carry its pieces; then nothing arrives any more."""

    def __init__(self, pairs: BlockPairs, pieces: list[BlockPairs], streams: list[Stream]) -> None:
        super().__init__(pieces, pairs.num_bytes)
        self._streams = streams

    def give_up(self) -> None:
        super().give_up()
        for stream in self._streams:
            stream.interrupt(self)


class SocketPeer:
    """A peer's pool, read by a few streams that share its reads."""

    def __init__(
        self,
        pool: CarriedPool,
        regions: Sequence[PoolRegion],
        backlog: Backlog[BlockPairs],
        streams: list[Stream],
        on_disconnect: Callable[[Backlog[BlockPairs]], None],
    ) -> None:
        self._pool = pool
        self._regions = tuple(regions)
        self._backlog = backlog
        self._streams = streams
        self._on_disconnect = on_disconnect
        self._connected = True

    @property
    def transport(self) -> str:
        return self._pool.transport

    async def greet(self) -> None:
        """A read of nothing: connects one stream and hears the server's answer."""
        nothing = BlockPairs.checked(self._pool.regions, self._regions, 0, [], [])
        await asyncio.shield(self._begin(nothing, [nothing]).ended)

    def read(self, group: int, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Read:
        if not self._connected:
            return failed_read(LinkLost("disconnected"))
        try:
            pairs = BlockPairs.checked(
                self._pool.regions, self._regions, group, remote_blocks, local_blocks
            )
        except TransferError as e:
            return failed_read(e)
        share = -(-pairs.num_bytes // len(self._streams))
        size = min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, share))
        size = min(size, MAX_REQUEST_BLOCKS * pairs.blob_bytes)
        return self._begin(pairs, pairs.pieces(size))

    def disconnect(self) -> None:
        if self._connected:
            self._connected = False
            self._backlog.end()
            self._on_disconnect(self._backlog)

    def _begin(self, pairs: BlockPairs, pieces: list[BlockPairs]) -> SocketRead:
        read = SocketRead(pairs, pieces, self._streams)
        if pieces:
            self._backlog.put(read)
        return read


def _pool(regions: Sequence[PoolRegion]) -> CarriedPool:
    if regions[0].memory == "cpu":
        return PoolBytes(regions)
    from kv_transfer.socket_device import DevicePool  # loads torch

    return DevicePool(regions)


def _address(payload: bytes) -> tuple[str, int]:
    host = payload[_PORT.size :]
    if not _HOST.fullmatch(host):
        raise TransferError("metadata: no address of the peer's socket", retryable=False)
    return host.decode(), _PORT.unpack_from(payload)[0]


def _check_memory(ours: Sequence[PoolRegion], theirs: Sequence[PoolRegion]) -> None:
    if ours[0].memory != theirs[0].memory:
        raise IncompatiblePeer("memory", f"{theirs[0].memory!r}, ours is {ours[0].memory!r}")
