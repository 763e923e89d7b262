"""The other process: a pool that our connectors and a bare socket let others read.

Answers each line of its standard input with the seconds of CPU that it took so far: "expect"
(somebody is about to connect) or "cpu".
"""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from benchmarks.transfer_pools import BenchPool
from kv_cache.events import new_incarnation
from kv_transfer.connector import Connector
from kv_transfer.registry import ConnectorConfig, open_connector

VECTORS = 64
_HEAD_BYTES = 8


def serve_bare(pool: BenchPool) -> int:
    """The least that sends blobs: the port of a server that trusts whoever connects."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, pool), daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def _accept(listener: socket.socket, pool: BenchPool) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_send_blobs, args=(sock, pool), daemon=True).start()


def _send_blobs(sock: socket.socket, pool: BenchPool) -> None:
    while head := sock.recv(_HEAD_BYTES, socket.MSG_WAITALL):
        group, count = head[0], int.from_bytes(head[1:], "little")
        data = sock.recv(4 * count, socket.MSG_WAITALL)
        blobs = pool.blobs[group]
        views = [
            memoryview(blobs[int.from_bytes(data[i : i + 4], "little")])
            for i in range(0, 4 * count, 4)
        ]
        move(views, lambda some: sock.sendmsg(some))


def move(views: list[memoryview], step: Any) -> None:
    at = 0
    while at < len(views):
        moved = step(views[at : at + VECTORS])
        while moved and moved >= len(views[at]):
            moved -= len(views[at])
            at += 1
        if moved:
            views[at] = views[at][moved:]


def bare_request(group: int, blocks: list[int]) -> bytes:
    head = bytes([group]) + len(blocks).to_bytes(_HEAD_BYTES - 1, "little")
    return head + b"".join(block.to_bytes(4, "little") for block in blocks)


async def serve(names: list[str], group_bytes: int, answers: Any) -> None:
    pool = BenchPool(group_bytes, fill=1)
    incarnation = new_incarnation()
    connectors: dict[str, Connector] = {
        name: await open_connector(name, pool.regions, incarnation, ConnectorConfig())
        for name in names
    }
    info = {
        "pid": os.getpid(),
        "incarnation": incarnation,
        "metadata": {name: c.metadata().hex() for name, c in connectors.items()},
        "bare_port": serve_bare(pool),
        "addresses": [region.address for region in pool.regions],
    }
    answers.write(json.dumps(info) + "\n")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = line.strip()
        if order == "expect":
            for connector in connectors.values():
                connector.expect_peer()
        answers.write(json.dumps(time.process_time()) + "\n")
    os._exit(0)


if __name__ == "__main__":
    # UCX writes to standard output.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asyncio.run(serve(json.loads(sys.argv[1]), int(sys.argv[2]), channel))
