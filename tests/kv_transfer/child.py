"""A process with a pool and a connector, which does what its standard input says.

Each line is a JSON list: the name of one of `Child`'s methods, and its arguments.
"""

import asyncio
import ctypes
import json
import mmap
import os
import signal
import sys
import time
from typing import Any

from kv_transfer import socket_memory
from kv_transfer.connector import PeerPool, Read
from kv_transfer.errors import TransferError
from kv_transfer.registry import ConnectorConfig, open_connector
from tests.kv_transfer.pools import Pool

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Child:
    def __init__(
        self, name: str, groups: list[list[int]], seed: int | None, secret: str, memory: str
    ) -> None:
        shapes = tuple((num_blocks, blob_bytes) for num_blocks, blob_bytes in groups)
        self._pool = _pool(shapes, seed, memory)
        self._name = name
        self._secret = secret.encode()
        self._incarnation = os.getpid() << 20 | int.from_bytes(os.urandom(2))
        self._peers: list[PeerPool] = []
        self._reads: set[Read] = set()

    async def open(self) -> list[Any]:
        config = ConnectorConfig(self._secret)
        self._connector = await open_connector(
            self._name, self._pool.regions, self._incarnation, config
        )
        return [self._incarnation, self._connector.metadata().hex()]

    async def expect_peer(self) -> None:
        self._connector.expect_peer()

    async def connect(self, incarnation: int, metadata: str) -> int:
        self._peers.append(await self._connector.connect(incarnation, bytes.fromhex(metadata)))
        return len(self._peers) - 1

    async def disconnect(self, peer: int) -> None:
        self._peers[peer].disconnect()

    async def read(self, peer: int, group: int, remote: list[int], local: list[int]) -> None:
        await self._peers[peer].read(group, remote, local).ended

    async def read_for_ever(self, peer: int, group: int, remote: list[int]) -> None:
        """Answers after the first read; the next ones follow each other."""
        await self.read(peer, group, remote, remote)

        async def repeat() -> None:
            while True:
                await self.read(peer, group, remote, remote)

        self._endless = asyncio.ensure_future(repeat())

    async def cpu_s(self) -> float:
        return time.process_time()

    async def blob_sums(self, group: int) -> list[int]:
        self._pool.fetch()
        sums: list[int] = self._pool.blobs[group].sum(axis=1, dtype=int).tolist()
        return sums

    async def hide(self, hidden: bool) -> None:
        """The pool's memory is there for nobody, whoever asks the kernel for it, or there again."""
        for region in self._pool.regions:
            protection = mmap.PROT_READ | mmap.PROT_WRITE if not hidden else 0
            if _LIBC.mprotect(region.address, region.num_bytes, protection):
                raise OSError(ctypes.get_errno(), "mprotect")

    async def stop_in_mid_send(self) -> None:
        """The next answer stops this process when half of it is sent."""
        names = vars(socket_memory)
        send = names["send_views"]

        def send_half(sock: Any, views: list[memoryview]) -> None:
            if not views:  # a greeting's
                return
            names["send_views"] = send
            first, *others = views
            half = len(first) // 2
            send(sock, [first[:half]])
            signal.raise_signal(signal.SIGSTOP)  # this thread stops before it goes on
            send(sock, [first[half:], *others])

        names["send_views"] = send_half

    async def stop_beside_a_message(self) -> None:
        """The next answer stops this process when it has two messages on their way."""
        from kv_transfer.collective_gloo import GlooGroup

        send = GlooGroup.send
        sizes = []

        def send_and_stop(group: GlooGroup, data: Any) -> None:
            sizes.append(data.nbytes)
            send(group, data)
            if len(sizes) == 2:
                setattr(GlooGroup, "send", send)  # noqa: B010
                signal.raise_signal(signal.SIGSTOP)

        setattr(GlooGroup, "send", send_and_stop)  # noqa: B010

    async def await_no_readers(self) -> None:
        server = self._connector._server  # type: ignore[attr-defined]
        while server._connections:
            await asyncio.sleep(0.005)


def _pool(groups: tuple[tuple[int, int], ...], seed: int | None, memory: str) -> Pool:
    if memory == "cpu":
        return Pool(groups, seed)
    from tests.kv_transfer.gpu_pool import GpuPool  # loads torch

    return GpuPool(groups, seed)


async def serve(answers: Any) -> None:
    child = Child(*json.loads(sys.argv[1]))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        method, *arguments = json.loads(line)
        try:
            answer = {"result": await getattr(child, method)(*arguments)}
        except TransferError as e:
            answer = {"error": type(e).__name__, "message": str(e)}
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # a reader that never ends must not keep us


def main() -> None:
    # UCX and NIXL write to standard output.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asyncio.run(serve(channel))


if __name__ == "__main__":
    main()
