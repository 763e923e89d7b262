"""The cache as the scheduler sees it: sequences get blocks, give them back, find them again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kv_cache.config import CacheConfig, blocks_needed, blocks_of, first_visible
from kv_cache.events import EventLog, Snapshot
from kv_cache.eviction import make_policy
from kv_cache.names import BlockName
from kv_cache.pool import BlockPool
from kv_cache.sequence import CopyOnWrite, SequenceBlocks, TableChange
from kv_cache.transfers import TransferHolds
from kv_cache.tree import Match, Node, PrefixTree


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Blocks: free + held + cached + quarantined == total (the null block is none of them).
    `reserved` are for a hand-off that reads or writes them, and are held, too."""

    total: int
    free: int
    held: int
    cached: int
    quarantined: int
    reserved: int
    evicted: int  # since the start


@dataclass(frozen=True, slots=True)
class CacheStats:
    groups: tuple[GroupStats, ...]


class KvCache:
    """Owns the pools (one a group), the prefix tree, the transfers' holds and the events.

    It moves no bytes: that is the runner's work, told by what these methods return. Tables
    change in place and every change is returned too. For one thread.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.events = EventLog(len(config.groups), config.incarnation, config.max_events)
        self._pools: tuple[BlockPool[Node], ...] = tuple(
            BlockPool(n, make_policy(config.eviction, n)) for n in config.num_blocks
        )
        self._tree = PrefixTree(config.groups, config.block_size, self._pools, self.events)
        self.transfers = TransferHolds(self._pools)
        self._windows = [group.window for group in config.groups]
        self._margins = [int(config.watermark * pool.total) for pool in self._pools]

    def match(self, names: Sequence[BlockName], num_tokens: int) -> Match:
        """The longest hit for a prompt of `num_tokens`, at least 1; changes nothing.

        `names` are those of its full blocks from the first on; without names there is no hit.
        """
        return self._tree.match(names, num_tokens)

    def knows(self, name: BlockName) -> bool:
        """Whether some block has that name."""
        return name in self._tree

    def fits(self, match: Match, num_tokens: int) -> bool:
        """Whether `open(match)` and then `extend` to `num_tokens` and one block can succeed.

        Full-attention groups are counted whole, window groups with the most they hold at
        once, the hit's blocks among them. The watermark stays free, unless no block is held
        by anyone.
        """
        beyond = blocks_of(num_tokens, self.block_size) + 1 - match.num_blocks
        most = self._most_held(num_tokens)
        idle = all(pool.num_held == 0 for pool in self._pools)
        room = [
            pool.num_available - (0 if idle else margin)
            for pool, margin in zip(self._pools, self._margins, strict=True)
        ]
        # The hit's own blocks may be among those that are available now; they are counted
        # only where that decides.
        spare = min(left - min(beyond, held) for left, held in zip(room, most, strict=True))
        if spare < 0:
            return False
        if spare >= match.num_blocks:
            return True
        return all(
            left >= min(beyond + pinned, held)
            for left, pinned, held in zip(room, self._tree.num_idle(match), most, strict=True)
        )

    def ever_fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` fits an idle cache."""
        most = self._most_held(num_tokens)
        return all(held <= pool.total for held, pool in zip(most, self._pools, strict=True))

    def _most_held(self, num_tokens: int) -> list[int]:
        """What a sequence ever holds at once, and one more, of each group."""
        config = self.config
        return [
            blocks_needed(group, self.block_size, num_tokens, config.max_chunk_tokens)
            for group in config.groups
        ]

    def open(self, match: Match, *, priority: int = 0) -> SequenceBlocks:
        """A sequence that holds the hit; the match must be the cache's latest word on it.
        `priority` (lower is sooner) is for the eviction policy."""
        tables = self._tree.pin(match, priority)
        return SequenceBlocks(
            tables, list(match.firsts), match.num_blocks, priority, capacity=match.num_cached
        )

    def extend(
        self,
        blocks: SequenceBlocks,
        num_tokens: int,
        *,
        reserve_tokens: int = 0,
        computed: int = 0,
    ) -> Sequence[TableChange] | None:
        """Makes room for the positions below `num_tokens` in every group, or returns None.

        Full-attention groups get room for `reserve_tokens` if that is more: the prompt, at
        admission. `computed` is for a sequence whose cache comes from elsewhere (hand-off,
        swap): no query before that position will come, so window groups get no blocks, and
        keep none, that lie wholly behind its window.
        Cached blocks are evicted as needed. None: there are too few; no table has grown.
        """
        if num_tokens <= blocks.capacity and reserve_tokens <= blocks.capacity:
            return ()
        changes: list[TableChange] = []
        if computed:
            self._free_behind(blocks, computed, changes)
        spans = []
        for g, pool in enumerate(self._pools):
            tokens = num_tokens if self._windows[g] else max(num_tokens, reserve_tokens)
            start = max(len(blocks.tables[g]), blocks.first_live[g])
            span = range(start, blocks_of(tokens, self.block_size))
            if len(span) > pool.num_available:
                return None
            spans.append(span)
        for g, span in enumerate(spans):
            table = blocks.tables[g]
            table.extend([0] * (span.start - len(table)))
            for entry in span:
                block = self._take(g)
                table.append(block)
                changes.append(TableChange(g, entry, block))
        blocks.capacity = min(map(len, blocks.tables)) * self.block_size
        return changes

    def advance(
        self, blocks: SequenceBlocks, names: Sequence[BlockName], num_computed: int
    ) -> Sequence[TableChange]:
        """The keys and values of the first `num_computed` tokens are written and confirmed.

        Names the newly full blocks (`names` are those of the whole sequence, from its first
        block on; those that are missing are not named, or at a later block's end if they come
        by then) and frees what no later query sees.
        Where the tree has another block of that name, the table switches to it.
        """
        if num_computed < blocks.next_advance:
            return ()
        changes: list[TableChange] = []
        num_full = num_computed // self.block_size
        for entry in range(blocks.num_named, min(num_full, len(names))):
            parent = names[entry - 1] if entry else None
            own = [table[entry] for table in blocks.tables]
            kept = self._tree.insert(names[entry], parent, own, blocks.priority)
            for g, block in enumerate(kept):
                if block != own[g]:
                    blocks.tables[g][entry] = block
                    changes.append(TableChange(g, entry, block))
            blocks.num_named = entry + 1
        next_free = self._free_behind(blocks, num_computed, changes)
        blocks.next_advance = min(next_free, (num_full + 1) * self.block_size)
        return changes

    def _free_behind(
        self, blocks: SequenceBlocks, position: int, changes: list[TableChange]
    ) -> int:
        """Frees what queries from `position` on cannot see; where there will be more to free."""
        next_position = position + self.block_size
        for g, window in enumerate(self._windows):
            if window is None:
                continue
            table, live = blocks.tables[g], blocks.first_live[g]
            first = first_visible(position, window, self.block_size)
            for entry in range(live, min(first, len(table))):
                self._pools[g].release(table[entry])
                table[entry] = 0
                changes.append(TableChange(g, entry, 0))
            blocks.first_live[g] = max(live, first)
            behind = (blocks.first_live[g] + 1) * self.block_size
            next_position = min(next_position, behind + window - 1)
        return next_position

    def _take(self, group: int) -> int:
        pool = self._pools[group]
        if not pool.num_free:
            self._tree.evict(group)
        return pool.take()

    def fork(self, blocks: SequenceBlocks, num_tokens: int) -> SequenceBlocks:
        """A second sequence that shares the blocks of the first `num_tokens` tokens.

        Room beyond them stays with the first sequence. If the last of the shared blocks is
        partial, both call `make_writable` before they write to it.
        """
        count = blocks_of(num_tokens, self.block_size)
        tables = tuple(table[:count] for table in blocks.tables)
        for pool, table in zip(self._pools, tables, strict=True):
            for block in table:
                if block:
                    pool.touch(block, blocks.priority)
        partial = num_tokens % self.block_size != 0
        blocks.may_share = blocks.may_share or partial
        return SequenceBlocks(
            tables,
            list(blocks.first_live),
            min(blocks.num_named, num_tokens // self.block_size),
            blocks.priority,
            capacity=min(blocks.capacity, count * self.block_size),
            may_share=partial,
        )

    def make_writable(self, blocks: SequenceBlocks, position: int) -> Sequence[CopyOnWrite] | None:
        """Replaces the block of `position` by a copy where another sequence has it too.

        For a step that writes from `position` on, after `extend`. None: there are too few
        blocks; nothing has changed. A source may have no owner left: its copy must be made
        before anything else of the step is written.
        """
        if not blocks.may_share:
            return ()
        entry = position // self.block_size
        shared = [
            g
            for g, table in enumerate(blocks.tables)
            if not self._pools[g].is_writable(table[entry])
        ]
        if any(not self._pools[g].num_available for g in shared):
            return None
        copies = []
        for g in shared:
            source, target = blocks.tables[g][entry], self._take(g)
            blocks.tables[g][entry] = target
            self._pools[g].release(source)
            copies.append(CopyOnWrite(g, entry, source, target))
        blocks.may_share = False
        return copies

    def release(self, blocks: SequenceBlocks) -> None:
        """Gives everything back; named blocks stay cached. `blocks` holds nothing afterwards."""
        for pool, table in zip(self._pools, blocks.tables, strict=True):
            for block in reversed(table):
                if block:
                    pool.release(block)
            table.clear()
        blocks.first_live = [0] * len(blocks.tables)
        blocks.num_named = blocks.capacity = blocks.next_advance = 0
        blocks.may_share = False

    def forget(self, names: Sequence[BlockName]) -> None:
        """Of a prefix whose keys and values are in doubt: what no sequence holds is not found
        again, nor what goes on from there."""
        self._tree.forget(names)

    def reset(self) -> None:
        """Forgets every cached block that nobody holds."""
        self._tree.clear()

    def reset_counts(self) -> None:
        """What was evicted so far is as if it had not been."""
        self._tree.num_evicted = [0] * len(self._pools)

    def snapshot(self) -> Snapshot:
        """All that is stored now; closes the step's batch of events."""
        return self.events.snapshot(self._tree.stored())

    def stats(self) -> CacheStats:
        groups = tuple(
            GroupStats(
                pool.total,
                pool.num_free,
                pool.num_held,
                pool.num_cached,
                pool.num_quarantined,
                pool.num_in_transfer,
                evicted,
            )
            for pool, evicted in zip(self._pools, self._tree.num_evicted, strict=True)
        )
        return CacheStats(groups)

    def check_integrity(self, live: Iterable[SequenceBlocks]) -> None:
        """Asserts that `live` and the transfers explain every reference, exactly."""
        self._tree.check_integrity()
        requests = [[0] * pool.num_blocks for pool in self._pools]
        for blocks in live:
            self._check_sequence(blocks)
            for counts, table in zip(requests, blocks.tables, strict=True):
                for block in filter(None, table):
                    counts[block] += 1
        for pool, counts, (active, stuck) in zip(
            self._pools, requests, self.transfers.count_owners(), strict=True
        ):
            pool.check_integrity()
            known = [(count, 0, 0) for count in counts]
            for block in active.keys() | stuck.keys():
                known[block] = (counts[block], active.get(block, 0), stuck.get(block, 0))
            owners = pool.all_owners()
            assert owners == known, [
                (block, *pair)
                for block, pair in enumerate(zip(owners, known, strict=True))
                if pair[0] != pair[1]
            ]

    def _check_sequence(self, blocks: SequenceBlocks) -> None:
        for g, table in enumerate(blocks.tables):
            live = blocks.first_live[g]
            assert not any(table[:live]), f"group {g} holds what nobody sees"
            assert all(table[live:]), f"group {g} has a hole"
            assert len(table) * self.block_size >= blocks.capacity
            labels = self._pools[g].labels
            nodes = [labels[block] for block in table[live : blocks.num_named]]
            assert all(nodes), f"group {g} has a named block without its name"
            for above, node in pairwise(filter(None, nodes)):
                assert node.parent == above.name, f"group {g} has blocks of two prefixes"
