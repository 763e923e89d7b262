"""How blobs get from a peer's pool into ours: one interface, several ways.

The reader places every byte. A holder only lets its pool be read; what of it may be read, and
how long it stays, is the hand-off's business.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """One group's slab: block b is the run of `blob_bytes` at `address + b * blob_bytes`.

    The memory outlives the connectors that know it; `owner` is what keeps it alive, for a
    connector that has to be abandoned with a read that never ended.
    """

    address: int
    num_blocks: int
    blob_bytes: int
    memory: str = "cpu"  # or "cuda"
    device: int = 0
    owner: object = field(default=None, compare=False, repr=False)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.blob_bytes


class Read(Protocol):
    """Blobs on their way into our pool.

    `ended` is the only proof that nothing of the read writes any more. It is resolved on the
    event loop: with None if every byte is there, with a TransferError if not. Whoever waits
    for it with a deadline shields it, since a cancelled future proves nothing.
    """

    @property
    def ended(self) -> asyncio.Future[None]: ...

    @property
    def num_bytes(self) -> int: ...

    def give_up(self) -> None:
        """The bytes are not wanted any more. Never blocks; may bring the end nearer, or not."""
        ...


class PeerPool(Protocol):
    """A connected peer's pool, for one incarnation of it; used on the event loop's thread."""

    @property
    def transport(self) -> str:
        """What moves the bytes, as far as it can be learnt, for people to read."""
        ...

    def read(self, group: int, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Read:
        """Starts to copy the peer's blocks over ours, pair by pair; never blocks, never raises.

        The caller owns both ends until `ended`: ours by a hold, the peer's by its lease.
        """
        ...

    def disconnect(self) -> None:
        """Forgets the peer; what is under way goes on until its `ended`. Idempotent."""
        ...


class Connector(Protocol):
    """Our pool, made readable in one way, and the peers whose pools are read in that way.

    Opened once, with all groups' regions, on a running event loop (`registry.open_connector`).
    """

    @property
    def name(self) -> str: ...

    def metadata(self) -> bytes:
        """What a peer needs to connect; it is checked there as any input is."""
        ...

    async def connect(self, incarnation: int, metadata: bytes) -> PeerPool:
        """TransferError if the peer cannot be reached, or if the metadata is not a peer's;
        IncompatiblePeer if its pool differs from ours or it is another incarnation's."""
        ...

    def expect_peer(self) -> None:
        """Somebody has just got our metadata: who connects in the next seconds is helped soon."""
        ...

    def problem(self) -> str | None:
        """Why neither we nor our peers should count on it any more: the worker is replaced."""
        ...

    async def close(self) -> None:
        """Ends everything; reads that did not end before have ended when it returns, or keep
        the process's memory to themselves until its end."""
        ...
