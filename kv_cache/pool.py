"""Which blocks of one group's slab are free, held, cached or in quarantine, and by whom."""

from collections.abc import Iterable
from enum import Enum
from typing import Generic, TypeVar

from kv_cache.errors import CacheError
from kv_cache.eviction import EvictionPolicy, EvictionQueue, Lru

Label = TypeVar("Label")


class BlockState(Enum):
    """What a block is; the strongest owner decides."""

    FREE = "free"  # no owner, no label
    CACHED = "cached"  # no owner, labelled: may be evicted
    HELD = "held"  # by sequences, by transfers
    QUARANTINED = "quarantined"  # an unfinished READ may still write to it


class BlockPool(Generic[Label]):
    """Owns the numbers 1 .. num_blocks - 1; knows neither names nor bytes nor other groups.

        owner           begins                  ends
        sequence        take, touch             release
        transfer        hold                    drop
        READ handle     quarantine (from hold)  end_quarantine
        label           label                   remove

    A block is freed by the last of its owners, whichever kind that is; a label keeps it
    without holding it. What a label is, is the caller's business. Block 0 is never handed
    out: it stands for "no block" in tables. Every operation is O(1) a block.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy | None = None) -> None:
        if num_blocks < 2:
            raise CacheError(f"num_blocks: {num_blocks}, must be at least 2 (block 0 is none)")
        self.num_blocks = num_blocks
        self.num_quarantined = 0
        self.num_in_transfer = 0
        self.labels: list[Label | None] = [None] * num_blocks
        self._policy = policy or Lru(num_blocks)
        self._queue = EvictionQueue(num_blocks, self._policy)
        # A stack: what was used last is warm, and memory is first touched in ascending order.
        self._free = list(range(num_blocks - 1, 0, -1))
        self._requests = [0] * num_blocks
        self._transfers = [0] * num_blocks
        self._reads = [0] * num_blocks  # unfinished ones, in quarantine

    @property
    def total(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._queue)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give, once all that may be evicted is."""
        return len(self._free) + len(self._queue)

    @property
    def num_held(self) -> int:
        return self.total - self.num_available - self.num_quarantined

    def take(self) -> int:
        """A free block, for one sequence; there must be one."""
        block = self._free.pop()
        self._requests[block] = 1
        return block

    def touch(self, block: int, priority: int = 0) -> None:
        """One more sequence holds a block that is held or cached."""
        if self.is_cached(block):
            self._queue.remove(block)
        else:
            assert self._requests[block] or self._transfers[block], f"block {block} is free"
        self._requests[block] += 1
        if self.labels[block] is not None:
            self._policy.use(block, priority)

    def release(self, block: int) -> None:
        """Children before their parents, that they are evicted in this order."""
        self._requests[block] -= 1
        assert self._requests[block] >= 0, f"block {block} is held by no sequence"
        self._settle(block)

    def label(self, block: int, label: Label, priority: int = 0) -> None:
        """A held block with all its bytes written becomes one that can be found."""
        assert self._requests[block], f"block {block} is held by no sequence"
        assert not self._reads[block], f"block {block} is still being written"
        assert self.labels[block] is None, f"block {block} has a label"
        self.labels[block] = label
        self._policy.use(block, priority)

    def remove(self, block: int) -> None:
        """Takes the label away; a block that is only cached is free then."""
        assert self.labels[block] is not None, f"block {block} has no label"
        self.labels[block] = None
        self._policy.forget(block)
        if self.is_cached(block):
            self._queue.remove(block)
            self._free.append(block)

    def victim(self) -> int | None:
        """The cached block to give up next; the caller removes it."""
        return self._queue.first()

    def hold(self, blocks: Iterable[int]) -> None:
        """A transfer begins to read or write blocks that are held or cached."""
        for block in blocks:
            if self.is_cached(block):
                self._queue.remove(block)
            else:
                assert self._requests[block] or self._transfers[block], f"block {block} is free"
            self.num_in_transfer += not self._transfers[block]
            self._transfers[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._drop(block)
            self._settle(block)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """The transfer ended but its READ did not: its handle owns the blocks from now on."""
        for block in blocks:
            assert self.labels[block] is None, f"block {block} has a name before its bytes"
            self._drop(block)
            self.num_quarantined += not self._reads[block]
            self._reads[block] += 1

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        """The READ is done or has failed for good."""
        for block in blocks:
            self._reads[block] -= 1
            assert self._reads[block] >= 0, f"block {block} is not in quarantine"
            self.num_quarantined -= not self._reads[block]
            self._settle(block)

    def is_cached(self, block: int) -> bool:
        return block in self._queue

    def is_in_use(self, block: int) -> bool:
        """Whether a sequence holds the block."""
        return self._requests[block] > 0

    def is_writable(self, block: int) -> bool:
        """Whether the one sequence that holds the block may write to it."""
        return self._requests[block] == 1 and self.labels[block] is None

    def owners(self, block: int) -> tuple[int, int, int]:
        """How many sequences, transfers and unfinished READs own it."""
        return self._requests[block], self._transfers[block], self._reads[block]

    def all_owners(self) -> list[tuple[int, int, int]]:
        """The same of every block."""
        return list(zip(self._requests, self._transfers, self._reads, strict=True))

    def state(self, block: int) -> BlockState:
        if self._reads[block]:
            return BlockState.QUARANTINED
        if self._requests[block] or self._transfers[block]:
            return BlockState.HELD
        return BlockState.FREE if self.labels[block] is None else BlockState.CACHED

    def _drop(self, block: int) -> None:
        self._transfers[block] -= 1
        assert self._transfers[block] >= 0, f"block {block} is held by no transfer"
        self.num_in_transfer -= not self._transfers[block]

    def _settle(self, block: int) -> None:
        """Frees or caches a block whose last owner has gone."""
        if self._requests[block] or self._transfers[block] or self._reads[block]:
            return
        if self.labels[block] is None:
            self._free.append(block)
        else:
            self._queue.add(block)

    def check_integrity(self) -> None:
        """Asserts that every block is in one state, in the list of that state and no other."""
        self._queue.check_integrity()
        free, cached = set(self._free), set(self._queue)
        assert len(free) == len(self._free), "a block is free twice"
        assert 0 not in free | cached, "block 0 was put into circulation"
        assert self.owners(0) == (0, 0, 0), "block 0 has an owner"
        assert self.labels[0] is None, "block 0 has a label"
        held: set[int] = set()
        quarantined: set[int] = set()
        for block, owners in enumerate(self.all_owners()):
            if any(owners):
                assert min(owners) >= 0, f"block {block} has a negative count"
                (quarantined if owners[2] else held).add(block)
        idle = set(range(1, self.num_blocks)) - held - quarantined
        labelled = {block for block, label in enumerate(self.labels) if label is not None}
        assert free == idle - labelled, f"free or not? {free ^ (idle - labelled)}"
        assert cached == idle & labelled, f"cached or not? {cached ^ (idle & labelled)}"
        assert len(held) == self.num_held
        assert len(quarantined) == self.num_quarantined
        assert sum(map(bool, self._transfers)) == self.num_in_transfer
