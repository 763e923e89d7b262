"""Small pools with bytes that tell where they belong."""

import mmap

import numpy as np
from numpy.typing import NDArray

from kv_transfer.connector import PoolRegion

GROUPS = ((48, 4096), (20, 12288))  # (blocks, bytes of a blob)


class Pool:
    """Memory of its own for each group; `blobs[group]` is [block, byte]."""

    def __init__(
        self, groups: tuple[tuple[int, int], ...] = GROUPS, seed: int | None = None
    ) -> None:
        self.blobs: list[NDArray[np.uint8]] = []
        self.regions: list[PoolRegion] = []
        rng = np.random.default_rng(seed)
        for num_blocks, blob_bytes in groups:
            memory = mmap.mmap(-1, num_blocks * blob_bytes)
            blobs = np.frombuffer(memory, np.uint8).reshape(num_blocks, blob_bytes)
            if seed is not None:
                blobs[:] = rng.integers(0, 256, blobs.shape, dtype=np.uint8)
            self.blobs.append(blobs)
            self.regions.append(PoolRegion(blobs.ctypes.data, num_blocks, blob_bytes, owner=memory))

    def fetch(self) -> None:
        """Brings `blobs` up to date."""
