"""Readers that are killed in mid-transfer, each out of one process that has all of it loaded.

For every number on its standard input so many processes are forked. Each connects and has always
two reads under way, of the whole pool as often as that takes, until it is killed when every one of
them has done its first; then a line says so.
"""

import asyncio
import json
import os
import signal
import sys

from kv_cache.events import new_incarnation
from kv_transfer import nixl
from kv_transfer.nixl_connector import NixlConfig
from kv_transfer.registry import ConnectorConfig, open_connector
from kv_transfer.socket_connector import SocketConfig
from tests.kv_transfer.pools import Pool

READ_BYTES = 16 << 20  # more than sockets buffer


async def read_for_ever(
    name: str, pool: Pool, incarnation: int, metadata: bytes, under_way: int
) -> None:
    config = ConnectorConfig(nixl=NixlConfig(lanes=1), socket=SocketConfig(streams=1))
    connector = await open_connector(name, pool.regions, new_incarnation(), config)
    peer = await connector.connect(incarnation, metadata)
    region = pool.regions[0]
    times = -(-READ_BYTES // (region.num_blocks * region.blob_bytes))
    blocks = list(range(region.num_blocks)) * times

    async def repeat() -> None:
        while True:
            await peer.read(0, blocks, blocks).ended
            os.write(under_way, b".")

    await asyncio.gather(repeat(), repeat())


def begin(name: str, pool: Pool, incarnation: int, metadata: bytes) -> tuple[int, int]:
    """A reader's process, and where it says that a read is done; its pages of the pool are its
    own."""
    done, under_way = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(done)
        asyncio.run(read_for_ever(name, pool, incarnation, metadata, under_way))
    os.close(under_way)
    return pid, done


def main() -> None:
    name, groups, incarnation, metadata = json.loads(sys.argv[1])
    pool = Pool(tuple(map(tuple, groups)))
    if name == "nixl":
        nixl.prepare_environment()
        nixl.load()
    if name == "collective":
        import kv_transfer.collective_connector  # noqa: F401 - and torch
    for line in sys.stdin:
        readers = [
            begin(name, pool, incarnation, bytes.fromhex(metadata)) for _ in range(int(line))
        ]
        for _, done in readers:
            assert os.read(done, 1), "it has read nothing"
        for pid, _ in readers:
            os.kill(pid, signal.SIGKILL)
        for pid, done in readers:
            os.waitpid(pid, 0)
            os.close(done)
        os.write(1, b"killed\n")


if __name__ == "__main__":
    main()
