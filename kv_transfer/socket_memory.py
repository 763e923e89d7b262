"""Blobs between a socket and the pool, without a copy in between that is ours."""

import ctypes
import socket
import ssl
from collections.abc import Callable, Sequence

from kv_transfer.block_pairs import Blocks, runs
from kv_transfer.carrier import End
from kv_transfer.connector import PoolRegion
from kv_transfer.errors import ConnectorUnavailable

_VECTORS = 64  # buffers a system call; more gain nothing


class PoolBytes:
    """The pool's memory, to be sent and received: the host's (a GPU's is `socket_device`'s)."""

    transport = "tcp"

    def __init__(self, regions: Sequence[PoolRegion]) -> None:
        for region in regions:
            if region.memory != "cpu":
                raise ConnectorUnavailable(f"memory: {region.memory!r}, this moves cpu only")
        self.regions = tuple(regions)
        self._views = [
            memoryview((ctypes.c_char * region.num_bytes).from_address(region.address)).cast("B")
            for region in regions
        ]

    def views(self, group: int, blocks: Blocks) -> list[memoryview]:
        """The blocks' bytes in order, neighbours in one."""
        size = self.regions[group].blob_bytes
        view = self._views[group]
        return [view[first * size : (first + count) * size] for first, count in runs(blocks)]

    def carry(self, sock: socket.socket, end: End) -> "SocketCarrier":
        return SocketCarrier(self, sock)


class SocketCarrier:
    """The connection itself carries the blobs."""

    def __init__(self, pool: PoolBytes, sock: socket.socket) -> None:
        self._pool = pool
        self._sock = sock

    def send(self, group: int, blocks: Blocks) -> None:
        send_views(self._sock, self._pool.views(group, blocks))

    def receive(self, group: int, blocks: Blocks, stopped: Callable[[], bool]) -> None:
        receive_views(self._sock, self._pool.views(group, blocks), stopped)

    def close(self) -> None:
        pass  # there is only the connection


def send_views(sock: socket.socket, views: list[memoryview]) -> None:
    if isinstance(sock, ssl.SSLSocket):  # knows no vectors
        for view in views:
            sock.sendall(view)
        return
    _move(views, lambda some: sock.sendmsg(some))


def receive_views(
    sock: socket.socket, views: list[memoryview], stopped: Callable[[], bool]
) -> None:
    """Raises as soon as `stopped`; nothing is written to the views after it has returned."""

    def receive(some: list[memoryview]) -> int:
        if stopped():
            raise ConnectionError("not wanted any more")
        if isinstance(sock, ssl.SSLSocket):
            return sock.recv_into(some[0])
        return sock.recvmsg_into(some)[0]

    _move(views, receive)


def _move(views: list[memoryview], step: Callable[[list[memoryview]], int]) -> None:
    """Until all bytes went through `step`, which moves some at the front of what it is given."""
    index = 0
    rest: memoryview | None = None  # of views[index], if a part of it was moved
    while index < len(views):
        some = views[index : index + _VECTORS]
        if rest is not None:
            some[0] = rest
        moved = step(some)
        if not moved:
            raise ConnectionError("the peer closed the connection")
        rest = None
        for view in some:
            if moved < len(view):
                rest = view[moved:] if moved else None
                break
            moved -= len(view)
            index += 1
