"""Readers that are killed in mid-transfer, each out of one process that has all of it loaded.

For every line on its standard input a process is forked, which connects and has always two reads
of the whole pool under way, until it is killed with the first of them done; then a line says so.
"""

import asyncio
import json
import os
import signal
import sys

from kv_transfer import nixl
from kv_transfer.nixl_connector import NixlConfig
from kv_transfer.registry import ConnectorConfig, new_incarnation, open_connector
from kv_transfer.socket_connector import SocketConfig
from tests.kv_transfer.pools import Pool


async def read_for_ever(
    name: str, pool: Pool, incarnation: int, metadata: bytes, under_way: int
) -> None:
    config = ConnectorConfig(nixl=NixlConfig(lanes=1), socket=SocketConfig(streams=1))
    connector = await open_connector(name, pool.regions, new_incarnation(), config)
    peer = await connector.connect(incarnation, metadata)
    blocks = list(range(pool.regions[0].num_blocks))

    async def repeat() -> None:
        while True:
            await peer.read(0, blocks, blocks).ended
            os.write(under_way, b".")

    await asyncio.gather(repeat(), repeat())


def main() -> None:
    name, groups, incarnation, metadata = json.loads(sys.argv[1])
    pool = Pool(tuple(map(tuple, groups)))
    if name == "nixl":
        nixl.prepare_environment()
        nixl.load()
    for _ in sys.stdin:
        done, under_way = os.pipe()
        pid = os.fork()
        if not pid:
            read = read_for_ever(name, pool, incarnation, bytes.fromhex(metadata), under_way)
            asyncio.run(read)
        os.close(under_way)
        assert os.read(done, 1), "it has read nothing"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(done)
        os.write(1, b"killed\n")


if __name__ == "__main__":
    main()
