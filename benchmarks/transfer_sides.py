"""What takes turns at copying the same blobs: connectors, and the least that could do it."""

import asyncio
import ctypes
import os
import socket
import threading
from collections.abc import Sequence
from typing import Protocol

from benchmarks.transfer_holder import bare_request, move
from benchmarks.transfer_pools import BLOB_BYTES, BenchPool
from kv_transfer.connector import PeerPool

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_IOV_MAX = 1024


class Side(Protocol):
    async def copy(self, group: int, remote: list[int], local: list[int]) -> None: ...


class ConnectorSide:
    def __init__(self, peer: PeerPool) -> None:
        self._peer = peer

    async def copy(self, group: int, remote: list[int], local: list[int]) -> None:
        await self._peer.read(group, remote, local).ended


class Memcpy:
    """One thread, one memmove a blob, inside this process."""

    def __init__(self, ours: BenchPool, source: BenchPool) -> None:
        self._ours = ours
        self._source = source

    async def copy(self, group: int, remote: list[int], local: list[int]) -> None:
        size = BLOB_BYTES[group]
        to, source = self._ours.regions[group].address, self._source.regions[group].address
        for r, b in zip(remote, local, strict=True):
            ctypes.memmove(to + b * size, source + r * size, size)


class BareSocket:
    """One connection over loopback, without any check."""

    def __init__(self, ours: BenchPool, port: int) -> None:
        self._ours = ours
        self._sock = socket.create_connection(("127.0.0.1", port))

    async def copy(self, group: int, remote: list[int], local: list[int]) -> None:
        await asyncio.to_thread(self._copy, group, remote, local)

    def _copy(self, group: int, remote: list[int], local: list[int]) -> None:
        self._sock.sendall(bare_request(group, remote))
        blobs = self._ours.blobs[group]
        move([memoryview(blobs[b]) for b in local], lambda some: self._sock.recvmsg_into(some)[0])


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class BareCma:
    """process_vm_readv, by as many threads as NIXL's connector has lanes."""

    def __init__(
        self, ours: BenchPool, pid: int, addresses: Sequence[int], num_threads: int
    ) -> None:
        self._ours = ours
        self._pid = pid
        self._addresses = addresses
        self._num_threads = num_threads

    async def copy(self, group: int, remote: list[int], local: list[int]) -> None:
        n = self._num_threads
        threads = [
            threading.Thread(target=self._copy, args=(group, remote[i::n], local[i::n]))
            for i in range(n)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _copy(self, group: int, remote: list[int], local: list[int]) -> None:
        size, start = BLOB_BYTES[group], self._addresses[group]
        for at in range(0, len(local), _IOV_MAX):
            ours = [_Vector(self._ours.address(group, b), size) for b in local[at : at + _IOV_MAX]]
            theirs = [_Vector(start + b * size, size) for b in remote[at : at + _IOV_MAX]]
            n = len(ours)
            arrays = (_Vector * n)(*ours), (_Vector * n)(*theirs)
            length = ctypes.c_ulong(n)
            moved = _libc.process_vm_readv(
                self._pid, arrays[0], length, arrays[1], length, ctypes.c_ulong(0)
            )
            if moved != n * size:  # it stops early where a page is not there
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
