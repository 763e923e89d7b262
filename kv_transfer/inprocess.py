"""Pools of one process, copied by a thread: tests, and both roles in one process."""

import asyncio
import ctypes
import threading
from collections.abc import Sequence

from kv_transfer.block_pairs import BlockPairs
from kv_transfer.connector import PoolRegion, Read
from kv_transfer.errors import ConnectorUnavailable, LinkLost, TransferError
from kv_transfer.piece_read import Backlog, PieceRead, failed_read
from kv_transfer.pool_description import PoolDescription

NAME = "inprocess"
_PIECE_BYTES = 4 << 20  # a read that was given up ends after so much

_open: dict[int, "InprocessConnector"] = {}


class InprocessConnector:
    """Copies between host pools of this process, which find each other by incarnation."""

    name = NAME

    def __init__(
        self, regions: Sequence[PoolRegion], incarnation: int, secret: bytes = b""
    ) -> None:
        for region in regions:
            if region.memory != "cpu":
                raise ConnectorUnavailable(f"memory: {region.memory!r}, inprocess copies cpu only")
        self.regions = tuple(regions)
        self.closed = False
        self._incarnation = incarnation
        self._secret = secret
        self._backlog: Backlog[tuple[BlockPairs, InprocessConnector]] = Backlog()
        self._thread = threading.Thread(target=self._copy, name="inprocess-copy", daemon=True)
        self._thread.start()
        _open[incarnation] = self

    def metadata(self) -> bytes:
        return PoolDescription(NAME, self._incarnation, self.regions, b"").encode(self._secret)

    async def connect(self, incarnation: int, metadata: bytes) -> "InprocessPeer":
        description = PoolDescription.decode(metadata, NAME, self._secret)
        description.check_fits(self.regions, incarnation)
        peer = _open.get(incarnation)
        if peer is None:
            raise TransferError(f"no pool of incarnation {incarnation:#x} in this process")
        return InprocessPeer(self, peer)

    def expect_peer(self) -> None:
        pass  # nobody waits for this side

    def problem(self) -> str | None:
        alive = self.closed or self._thread.is_alive()
        return None if alive else "the thread that copies has failed"

    async def close(self) -> None:
        self.closed = True
        _open.pop(self._incarnation, None)
        self._backlog.close()
        await asyncio.to_thread(self._thread.join)

    def begin(self, pairs: BlockPairs, peer: "InprocessConnector") -> Read:
        pieces = [(piece, peer) for piece in pairs.pieces(_PIECE_BYTES)]
        read = PieceRead(pieces, pairs.num_bytes)
        self._backlog.put(read)
        return read

    def _copy(self) -> None:
        while found := self._backlog.wait():
            read, (pairs, peer) = found
            if peer.closed:
                read.finish(TransferError("the peer's pool was closed"))
                continue
            ours, theirs = (side.regions[pairs.group].address for side in (self, peer))
            size = pairs.blob_bytes
            for local, remote in zip(pairs.local.tolist(), pairs.remote.tolist(), strict=True):
                ctypes.memmove(ours + local * size, theirs + remote * size, size)
            read.finish()


class InprocessPeer:
    """Another pool of this process."""

    transport = "memcpy"

    def __init__(self, ours: InprocessConnector, theirs: InprocessConnector) -> None:
        self._ours = ours
        self._theirs = theirs
        self._connected = True

    def read(self, group: int, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Read:
        if not self._connected:
            return failed_read(LinkLost("disconnected"))
        try:
            pairs = BlockPairs.checked(
                self._ours.regions, self._theirs.regions, group, remote_blocks, local_blocks
            )
        except TransferError as e:
            return failed_read(e)
        return self._ours.begin(pairs, self._theirs)

    def disconnect(self) -> None:
        self._connected = False
