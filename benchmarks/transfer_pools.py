"""Memory to copy from and to, touched, for every size of blob."""

import numpy as np
from numpy.typing import NDArray

from kv_cache.huge_pages import anonymous_memory
from kv_transfer.connector import PoolRegion

BLOB_BYTES = (16 << 10, 128 << 10, 1 << 20)


class BenchPool:
    """A group for each size of blob, with its own memory; `blobs[group]` is [block, byte]."""

    def __init__(self, group_bytes: int, fill: int) -> None:
        self.blobs: list[NDArray[np.uint8]] = []
        self.regions: list[PoolRegion] = []
        for blob_bytes in BLOB_BYTES:
            num_blocks = group_bytes // blob_bytes
            memory = anonymous_memory(num_blocks * blob_bytes)  # as the engine's slabs are
            blobs = np.frombuffer(memory, np.uint8).reshape(num_blocks, blob_bytes)
            blobs[:] = (np.arange(num_blocks, dtype=np.uint64)[:, None] + fill).astype(np.uint8)
            self.blobs.append(blobs)
            self.regions.append(PoolRegion(blobs.ctypes.data, num_blocks, blob_bytes, owner=memory))

    def address(self, group: int, block: int) -> int:
        return self.regions[group].address + block * self.regions[group].blob_bytes
