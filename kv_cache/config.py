"""How a cache is set up, and how many blocks a sequence takes of it."""

from dataclasses import dataclass

from kv_cache.errors import CacheError
from kv_cache.layout import KvGroup


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """`watermark` is the share of each pool that admissions leave to sequences that grow."""

    groups: tuple[KvGroup, ...]
    num_blocks: tuple[int, ...]  # of each group's slab, the null block 0 included
    block_size: int
    max_chunk_tokens: int  # the most tokens of one sequence in one step
    eviction: str = "lru"  # a key of kv_cache.eviction.EVICTION_POLICIES
    watermark: float = 0.01
    incarnation: int = 0  # of the process; goes with every event
    max_events: int = 65536  # kept for replay

    def __post_init__(self) -> None:
        if not self.groups:
            raise CacheError("groups: a cache needs at least one")
        if len(self.num_blocks) != len(self.groups):
            raise CacheError(f"num_blocks: {self.num_blocks}, must have one for each group")
        for field in ("block_size", "max_chunk_tokens", "max_events"):
            value = getattr(self, field)
            if value < 1:
                raise CacheError(f"{field}: {value}, must be at least 1")
        if not 0.0 <= self.watermark < 1.0:
            raise CacheError(f"watermark: {self.watermark}, must be at least 0 and less than 1")


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
    return -(-num_tokens // block_size)


def first_visible(position: int, window: int | None, block_size: int) -> int:
    """Index of the first block that a query at `position` or later can see."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def blocks_needed(group: KvGroup, block_size: int, num_tokens: int, max_chunk_tokens: int) -> int:
    """The most blocks of a group that a sequence of `num_tokens` holds at once, and one more.

    A pool that is to serve it has this many and the null block.
    """
    blocks = blocks_of(num_tokens, block_size)
    reach = group.window_blocks(block_size)
    if reach is None:
        return blocks + 1
    return min(blocks, reach + blocks_of(max_chunk_tokens, block_size)) + 1
