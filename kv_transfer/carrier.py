"""What moves blobs between the two ends of a connection that both have greeted on."""

import enum
import socket
from collections.abc import Callable
from typing import Protocol

from kv_transfer.block_pairs import Blocks
from kv_transfer.connector import PoolRegion


class End(enum.IntEnum):
    READER = 0
    HOLDER = 1


class Carrier(Protocol):
    """One end of one connection's blobs. One thread uses it, and closes it before the connection.

    Whatever fails is an OSError, after which both are of no use.
    """

    def send(self, group: int, blocks: Blocks) -> None: ...

    def receive(self, group: int, blocks: Blocks, stopped: Callable[[], bool]) -> None:
        """Raises soon after `stopped`; nothing is written to the blocks after it has returned."""
        ...

    def close(self) -> None: ...


class CarriedPool(Protocol):
    """Our pool, and how its blobs cross a connection; for any thread."""

    @property
    def regions(self) -> tuple[PoolRegion, ...]: ...

    @property
    def transport(self) -> str: ...

    def carry(self, sock: socket.socket, end: End) -> Carrier:
        """TransferError or OSError if the other end cannot, or proves to be none of ours."""
        ...
