"""Blobs in a card's memory or in pinned memory beside it, each full of a number of its own."""

from dataclasses import dataclass

import torch

from kv_transfer.connector import PoolRegion

NUMBERS = 251  # a prime, so that blobs a power of two apart differ


@dataclass(frozen=True)
class Blobs:
    """`memory` is "cuda" or "cpu", as of a `PoolRegion`."""

    memory: str
    num_blocks: int
    blob_bytes: int
    data: torch.Tensor  # [block, byte] uint8

    @classmethod
    def make(cls, memory: str, num_blocks: int, blob_bytes: int, first: int) -> "Blobs":
        pinned = memory == "cpu" and torch.cuda.is_available()
        data = torch.empty(
            num_blocks, blob_bytes, dtype=torch.uint8, device=memory, pin_memory=pinned
        )
        data[:] = _numbers(range(num_blocks), first).to(memory)[:, None]
        if memory == "cuda":
            torch.cuda.synchronize()
        return cls(memory, num_blocks, blob_bytes, data)

    @property
    def region(self) -> PoolRegion:
        place = self.data.data_ptr()
        return PoolRegion(place, self.num_blocks, self.blob_bytes, self.memory, owner=self.data)

    def share_of_others(self, local: list[int], remote: list[int], first: int) -> float:
        """Of the bytes of these blobs: those that are not what the peer's blobs have."""
        wanted = _numbers(remote, first).to(self.memory)[:, None]
        return float((self.data[local] != wanted).float().mean())


def _numbers(blocks: range | list[int], first: int) -> torch.Tensor:
    return torch.tensor([(block + first) % NUMBERS for block in blocks], dtype=torch.uint8)
