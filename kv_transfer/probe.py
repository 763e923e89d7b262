"""The first READs of a link: whether its connector can, and how fast it is."""

import asyncio
import time
from dataclasses import dataclass

from kv_transfer.connector import PeerPool
from kv_transfer.errors import TransferError

FIRST_READ_TIMEOUT_S = 5.0
PROBE_BYTES = 16 << 20
LATENCY_READS, RATE_READS = 5, 2
SCRATCH_BLOCK = 0  # of every group: no sequence ever has it


class NotEnded(TransferError):
    """A READ took too long. Until it has `ended`, its connector has to look after it."""

    def __init__(self, ended: asyncio.Future[None]) -> None:
        super().__init__(f"the first READ did not end within {FIRST_READ_TIMEOUT_S:.0f} s")
        self.ended = ended


@dataclass(slots=True)
class LinkFigures:
    """Measured when the link was made, and by the reads since."""

    latency_s: float
    bytes_per_s: float


async def probe(pool: PeerPool, blob_bytes: int) -> LinkFigures:
    """The first READ, which tells whether the connector can; then a few for each figure, of which
    the quickest counts: what holds up one of them is over soon, and the figures stay.

    Nobody reads what these bring: they go from scratch block to scratch block. So one that did
    not end may end whenever it does, though another connector is tried meanwhile.
    """
    await first_read(pool)
    latency_s = await _quickest(pool, 1, LATENCY_READS)
    count = max(1, PROBE_BYTES // blob_bytes)
    return LinkFigures(latency_s, count * blob_bytes / await _quickest(pool, count, RATE_READS))


async def first_read(pool: PeerPool) -> None:
    """TransferError if the pool cannot be read."""
    await _timed(pool, 1)


async def _quickest(pool: PeerPool, count: int, num_reads: int) -> float:
    return min([await _timed(pool, count) for _ in range(num_reads)])


async def _timed(pool: PeerPool, count: int) -> float:
    started = time.perf_counter()
    read = pool.read(0, [SCRATCH_BLOCK] * count, [SCRATCH_BLOCK] * count)
    try:
        done, _ = await asyncio.wait({read.ended}, timeout=FIRST_READ_TIMEOUT_S)
    finally:
        if not read.ended.done():
            read.give_up()
    if not done:
        raise NotEnded(read.ended)
    read.ended.result()
    return time.perf_counter() - started
