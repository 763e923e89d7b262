"""Which of a peer's blocks are copied over which of ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kv_transfer.connector import PoolRegion
from kv_transfer.errors import TransferError

Blocks = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """Blocks of one group, pair by pair; both numbers are inside their pools."""

    group: int
    remote: Blocks
    local: Blocks
    blob_bytes: int

    @classmethod
    def checked(
        cls,
        ours: Sequence[PoolRegion],
        theirs: Sequence[PoolRegion],
        group: int,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
    ) -> Self:
        if not 0 <= group < len(ours):
            raise TransferError(f"group: {group}, the pool has {len(ours)}", retryable=False)
        if len(remote_blocks) != len(local_blocks):
            raise TransferError(
                f"blocks: {len(remote_blocks)} remote ones for {len(local_blocks)} local ones",
                retryable=False,
            )
        remote = _inside(remote_blocks, theirs[group], "remote block")
        local = _inside(local_blocks, ours[group], "local block")
        return cls(group, remote, local, ours[group].blob_bytes)

    @property
    def num_bytes(self) -> int:
        return len(self.local) * self.blob_bytes

    def pieces(self, max_bytes: int) -> list[Self]:
        """The pairs in order, in parts of at most max_bytes, or of one block."""
        step = max(1, max_bytes // self.blob_bytes)
        return [
            type(self)(
                self.group,
                self.remote[start : start + step],
                self.local[start : start + step],
                self.blob_bytes,
            )
            for start in range(0, len(self.local), step)
        ]


def runs(blocks: Blocks) -> list[tuple[int, int]]:
    """(first block, number of blocks) of each stretch of neighbours, in order."""
    if not len(blocks):
        return []
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(blocks)])))
    return list(zip(blocks[starts].tolist(), lengths.tolist(), strict=True))


def _inside(blocks: Sequence[int], region: PoolRegion, what: str) -> Blocks:
    try:
        numbers = np.array(blocks, dtype=np.int64).reshape(len(blocks))
    except (OverflowError, TypeError, ValueError) as e:
        raise TransferError(f"{what}s: {e}", retryable=False) from e
    outside = (numbers < 0) | (numbers >= region.num_blocks)
    if outside.any():
        raise TransferError(
            f"{what}: {numbers[outside][0]}, the group has {region.num_blocks}", retryable=False
        )
    return numbers.astype(np.int32)
