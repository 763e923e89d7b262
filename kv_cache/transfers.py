"""Which transfers own blocks beside the sequences, and which of them never ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kv_cache.pool import BlockPool


@dataclass(frozen=True, slots=True, eq=False)
class TransferHold:
    """Blocks that one transfer reads or writes; given back once, by `drop` or `quarantine`."""

    group: int
    blocks: tuple[int, ...]


class TransferHolds:
    """The transfers' side of the pools: what one holds outlives the sequence it is for.

        hold -> active -> drop -> (gone)
                active -> quarantine -> quarantined -> end_quarantine -> (gone)

    It knows nothing of peers, handles or deadlines.
    """

    def __init__(self, pools: Sequence[BlockPool[Any]]) -> None:
        self._pools = pools
        self._active: set[TransferHold] = set()
        self._quarantined: set[TransferHold] = set()

    def hold(self, group: int, blocks: Sequence[int]) -> TransferHold:
        """For blocks that a sequence holds, or that are cached."""
        hold = TransferHold(group, tuple(blocks))
        self._pools[group].hold(hold.blocks)
        self._active.add(hold)
        return hold

    @property
    def num_active(self) -> int:
        return len(self._active)

    def drop(self, hold: TransferHold) -> None:
        """The transfer has ended: no byte of the blocks is read or written by it any more."""
        self._active.remove(hold)
        self._pools[hold.group].drop(reversed(hold.blocks))

    def quarantine(self, hold: TransferHold) -> None:
        """A READ into the (unnamed) blocks did not end in time: its handle keeps them."""
        self._active.remove(hold)
        self._quarantined.add(hold)
        self._pools[hold.group].quarantine(hold.blocks)

    def end_quarantine(self, hold: TransferHold) -> None:
        self._quarantined.remove(hold)
        self._pools[hold.group].end_quarantine(hold.blocks)

    def count_owners(self) -> list[tuple[dict[int, int], dict[int, int]]]:
        """For each group, how many active and quarantined holds every block has."""
        owners: list[tuple[dict[int, int], dict[int, int]]] = [({}, {}) for _ in self._pools]
        for kind, holds in enumerate((self._active, self._quarantined)):
            for hold in holds:
                counts = owners[hold.group][kind]
                for block in hold.blocks:
                    counts[block] = counts.get(block, 0) + 1
        return owners
