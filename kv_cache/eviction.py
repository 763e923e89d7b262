"""In which order blocks that nobody holds are given up.

A policy sorts blocks into a few buckets; the lowest bucket goes first, and inside a bucket the
block that was given back first. Two rules together put a child before its parent, so that a
prefix loses its leaves first: a sequence gives its last block back first, and every use of a
block is a use of its parent as well, so no policy may rank a block lower for being used more.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from kv_cache.errors import CacheError


class EvictionPolicy(Protocol):
    """Ranks the blocks of one pool. A block's bucket may change only while it is held."""

    num_buckets: int

    def use(self, block: int, priority: int) -> None:
        """A sequence of this priority (lower is sooner) begins to use the named block."""
        ...

    def forget(self, block: int) -> None:
        """The block has no name any more."""
        ...

    def bucket(self, block: int) -> int: ...


class Lru:
    """Least recently used first; keeps nothing of its own."""

    num_buckets = 1

    def __init__(self, num_blocks: int) -> None:
        pass

    def use(self, block: int, priority: int) -> None:
        pass

    def forget(self, block: int) -> None:
        pass

    def bucket(self, block: int) -> int:
        return 0


class Frequency:
    """Least often used first, in powers of two: 1, 2-3, 4-7, ... uses since the block was named."""

    num_buckets = 16

    def __init__(self, num_blocks: int) -> None:
        self._uses = [0] * num_blocks

    def use(self, block: int, priority: int) -> None:
        self._uses[block] += 1

    def forget(self, block: int) -> None:
        self._uses[block] = 0

    def bucket(self, block: int) -> int:
        return min(self._uses[block].bit_length(), self.num_buckets) - 1


class Priority:
    """Blocks of the least urgent sequences first; a block is as urgent as its best user was.

    Priorities beyond MOST_URGENT and LEAST_URGENT count as these.
    """

    MOST_URGENT = -32
    LEAST_URGENT = 31
    num_buckets = LEAST_URGENT - MOST_URGENT + 1

    def __init__(self, num_blocks: int) -> None:
        self._bucket = [0] * num_blocks

    def use(self, block: int, priority: int) -> None:
        bucket = self.LEAST_URGENT - max(priority, self.MOST_URGENT)
        if bucket > self._bucket[block]:
            self._bucket[block] = bucket

    def forget(self, block: int) -> None:
        self._bucket[block] = 0

    def bucket(self, block: int) -> int:
        return self._bucket[block]


EVICTION_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": Lru,
    "priority": Priority,
    "frequency": Frequency,
}


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    if name not in EVICTION_POLICIES:
        known = ", ".join(EVICTION_POLICIES)
        raise CacheError(f"eviction: no policy {name!r}, must be one of {known}")
    return EVICTION_POLICIES[name](num_blocks)


class EvictionQueue:
    """The blocks of one pool that may be evicted, in the policy's order; every operation O(1).

    Each bucket is a ring through two preallocated lists, closed by an end mark of its own
    (number num_blocks + bucket). A block in no ring is linked to itself.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._num_blocks = num_blocks
        self._next = list(range(num_blocks + policy.num_buckets))
        self._prev = list(range(num_blocks + policy.num_buckets))
        self._filled = 0  # bit b is set while bucket b has a block
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return self._next[block] != block

    def __iter__(self) -> Iterator[int]:
        """In eviction order; the queue must not change meanwhile."""
        for end in range(self._num_blocks, len(self._next)):
            block = self._next[end]
            while block != end:
                yield block
                block = self._next[block]

    def add(self, block: int) -> None:
        """As the last one of its bucket."""
        bucket = self._policy.bucket(block)
        end = self._num_blocks + bucket
        last = self._prev[end]
        self._next[last] = self._prev[end] = block
        self._prev[block] = last
        self._next[block] = end
        self._filled |= 1 << bucket
        self._count += 1

    def remove(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        assert after != block, f"block {block} is not in the queue"
        self._next[before] = after
        self._prev[after] = before
        if before == after:  # only the end mark is left
            self._filled &= ~(1 << (after - self._num_blocks))
        self._next[block] = self._prev[block] = block
        self._count -= 1

    def first(self) -> int | None:
        """The block to evict next; it stays."""
        if not self._filled:
            return None
        bucket = (self._filled & -self._filled).bit_length() - 1
        return self._next[self._num_blocks + bucket]

    def check_integrity(self) -> None:
        blocks = list(self)
        assert len(blocks) == len(set(blocks)) == self._count, "the count is not the length"
        after, before = (
            [block for block, other in enumerate(links[: self._num_blocks]) if block != other]
            for links in (self._next, self._prev)
        )
        assert after == before, f"half linked: {set(after) ^ set(before)}"
        assert len(after) == self._count
        back = [self._prev[node] for node in self._next]
        assert back == list(range(len(back))), "a link that does not lead back"
        for bucket in range(self._policy.num_buckets):
            end = self._num_blocks + bucket
            assert (self._filled >> bucket & 1) == (self._next[end] != end), f"bucket {bucket}"
