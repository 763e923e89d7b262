"""The cache as the scheduler sees it: sequences get blocks, give them back, find them again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv_cache.layout import KvGroup
from kv_cache.names import BlockName
from kv_cache.sequence import CopyOnWrite, SequenceBlocks, TableChange


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """`watermark` is the share of each pool that admissions leave to sequences that grow."""

    groups: tuple[KvGroup, ...]
    num_blocks: tuple[int, ...]  # of each group's slab, the null block 0 included
    block_size: int
    max_chunk_tokens: int  # the most tokens of one sequence in one step
    eviction: str = "lru"  # lru, priority, frequency
    watermark: float = 0.01
    incarnation: int = 0  # of the process; goes with every event
    max_events: int = 65536  # kept for replay


@dataclass(frozen=True, slots=True)
class Match:  # lives in kv_cache.tree
    """What the cache has of a prompt; valid until something is evicted (`open` asserts it).

    `num_tokens` of them need not be computed, at most one less than there are. `num_cached`
    are in the cache; one more than `num_tokens` when the whole prompt is: its last token is
    computed again but not written.
    """

    names: Sequence[BlockName]
    num_prompt_tokens: int
    num_blocks: int
    num_tokens: int
    num_cached: int
    firsts: tuple[int, ...]  # of each group, the first block that the hit needs
    stamp: int


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Blocks; free + held + cached + quarantined == total (the null block is in none)."""

    total: int
    free: int
    held: int
    cached: int
    quarantined: int
    evicted: int  # since the start


@dataclass(frozen=True, slots=True)
class CacheStats:
    groups: tuple[GroupStats, ...]
    query_tokens: int  # of all sequences opened (not resumed) since the start
    hit_tokens: int  # of them, those that were not computed


def blocks_needed(group: KvGroup, block_size: int, num_tokens: int, max_chunk_tokens: int) -> int:
    """The most blocks that one sequence of `num_tokens` holds at once, and one more.

    A pool that serves it needs this number and the null block.
    """
    raise NotImplementedError


class KvCache:
    """Owns the pools (one a group), the prefix tree and the events; for one thread.

    Public attributes: `block_size`, `groups`, `transfers` (kv_cache.transfers.TransferHolds:
    hold, drop, quarantine, end_quarantine), `events` (kv_cache.events.EventLog).
    It moves no bytes: that is the runner's work, told by what these methods return.
    """

    def __init__(self, config: CacheConfig) -> None: ...

    def match(self, names: Sequence[BlockName], num_tokens: int) -> Match:
        """The longest hit for a prompt of `num_tokens` (>= 1); changes nothing.

        No names, no hit.
        """
        raise NotImplementedError

    def fits(self, match: Match, num_tokens: int) -> bool:
        """Whether `open(match)` and an `extend` to `num_tokens` and one block would succeed.

        Full-attention groups are counted whole, window groups with one chunk. The watermark
        stays free, unless nothing at all is held.
        """
        raise NotImplementedError

    def ever_fits(self, num_tokens: int) -> bool:
        """Whether `fits` is true for it on an idle cache."""
        raise NotImplementedError

    def open(self, match: Match, *, priority: int = 0, resumed: bool = False) -> SequenceBlocks:
        """Pins the hit. `priority` (lower is sooner) is kept for the eviction policy;
        a resumed sequence is not counted in the hit statistics again."""
        raise NotImplementedError

    def extend(
        self,
        blocks: SequenceBlocks,
        num_tokens: int,
        *,
        reserve_tokens: int = 0,
        computed: int = 0,
    ) -> Sequence[TableChange] | None:
        """Makes room for positions < num_tokens in every group, or returns None.

        Full-attention groups get room for `reserve_tokens` if that is more (the prompt, at
        admission). `computed` is for a sequence whose cache comes from elsewhere (hand-off,
        swap): no query before that position will be asked, so window groups get no block
        that lies wholly behind its window; those they have are freed.
        Evicts as needed. None: impossible now, the tables have not grown.
        """
        raise NotImplementedError

    def advance(
        self, blocks: SequenceBlocks, names: Sequence[BlockName], num_computed: int
    ) -> Sequence[TableChange]:
        """Tells that the cache of the first `num_computed` tokens is written and confirmed.

        Gives the newly full blocks their names (`names` are those of the whole sequence,
        from the first block on; may be empty) and frees what no later query can see. Where
        another block has the name already, the table switches to it.
        """
        raise NotImplementedError

    def fork(self, blocks: SequenceBlocks, num_tokens: int) -> SequenceBlocks:
        """A second sequence that shares the blocks of the first `num_tokens` tokens.

        Room beyond them stays the first one's alone; both call `make_writable` before their
        next write.
        """
        raise NotImplementedError

    def make_writable(self, blocks: SequenceBlocks, position: int) -> Sequence[CopyOnWrite] | None:
        """Gives the sequence a copy of the block of `position` where others hold it too.

        Call it after `extend` and before a step that writes from `position` on. None: no
        block to be had, nothing changed. A source may be freed any time after: the copies
        must run before whatever else the step writes.
        """
        raise NotImplementedError

    def release(self, blocks: SequenceBlocks) -> None:
        """Gives everything back; named blocks stay cached. `blocks` is empty afterwards."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets every cached block that nobody holds."""
        raise NotImplementedError

    def stats(self) -> CacheStats:
        raise NotImplementedError

    def check_integrity(self, live: Iterable[SequenceBlocks]) -> None:
        """Asserts that every reference is explained by `live` or by a transfer, exactly."""
        raise NotImplementedError
