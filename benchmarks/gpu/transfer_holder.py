"""The process whose blobs are read: the card's, and the host's beside it.

python -m benchmarks.gpu.transfer_holder MEMORY NUM_BLOCKS BLOB_BYTES FIRST

Says on a line what a peer needs to know; lives until its standard input ends.
"""

import asyncio
import json
import os
import sys
from typing import TextIO

from benchmarks.gpu.blobs import Blobs
from kv_cache.events import new_incarnation
from kv_transfer.registry import ConnectorConfig, open_connector


async def serve(blobs: Blobs, answers: TextIO) -> None:
    incarnation = new_incarnation()
    connector = await open_connector("nixl", [blobs.region], incarnation, ConnectorConfig())
    connector.expect_peer()
    known = {"incarnation": incarnation, "metadata": connector.metadata().hex()}
    answers.write(json.dumps(known) + "\n")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    # UCX writes to standard output.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    memory, *numbers = sys.argv[1:]
    asyncio.run(serve(Blobs.make(memory, *map(int, numbers)), channel))
