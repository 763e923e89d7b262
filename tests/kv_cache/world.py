"""A cache, the memory that its tables point to, and what ought to be found in it.

Memory holds, instead of keys and values, for which tokens they were computed. A sequence that
computes a token looks at everything a query there sees, so a wrong table shows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_cache.cache import KvCache
from kv_cache.config import CacheConfig
from kv_cache.events import Cleared, EventLog, Gap, Removed, Snapshot, Stored, name_digest
from kv_cache.layout import KvGroup
from kv_cache.names import BlockName, SequenceNames, root_name
from kv_cache.sequence import SequenceBlocks, TableChange
from kv_cache.transfers import TransferHold
from kv_cache.tree import Match

ROOT = root_name("test")
BLOCK_SIZE = 4
CHUNK = 8


def full_group() -> KvGroup:
    return KvGroup(layers=(0,), num_kv_heads=1, widths=(8, 8))


def window_group(window: int) -> KvGroup:
    return KvGroup(layers=(1,), num_kv_heads=1, widths=(8, 8), window=window)


GROUPS = {
    "full": (full_group(),),
    "window": (window_group(6),),
    "window-of-whole-blocks": (window_group(5),),
    "mixed": (full_group(), window_group(6)),
    "four": (window_group(1), full_group(), window_group(9), full_group()),
}


class Publisher(Protocol):
    """What a subscriber needs of a cache."""

    events: EventLog

    def snapshot(self) -> Snapshot: ...


@dataclass
class Index:
    """What a subscriber makes of the events; starts again from a snapshot after a gap."""

    seen: int = 0
    blobs: dict[tuple[BlockName, int], BlockName | None] = field(default_factory=dict)
    full_groups: tuple[int, ...] = ()

    def follow(self, cache: Publisher) -> None:
        batches = cache.events.since(self.seen)
        if isinstance(batches, Gap):
            snapshot = cache.snapshot()
            self.seen = snapshot.number
            self.blobs = {(s.name, s.group): s.parent for s in snapshot.stored}
            assert self.digests(len(snapshot.digests)) == snapshot.digests
            return
        for batch in batches:
            assert batch.number == self.seen + 1
            for event in batch.events:
                self.apply(event)
            self.seen = batch.number
            assert self.digests(len(batch.digests)) == batch.digests

    def apply(self, event: Stored | Removed | Cleared) -> None:
        match event:
            case Stored(name, parent, group):
                assert (name, group) not in self.blobs, "stored twice"
                if group in self.full_groups and parent is not None:
                    assert (parent, group) in self.blobs, "stored before its parent"
                self.blobs[name, group] = parent
            case Removed(name, group):
                del self.blobs[name, group]
                if group in self.full_groups:
                    orphans = [k for k, p in self.blobs.items() if (p, k[1]) == (name, group)]
                    assert not orphans, "a parent went before its child"
            case Cleared():
                self.blobs.clear()

    def digests(self, num_groups: int) -> tuple[int, ...]:
        sums = [0] * num_groups
        for name, group in self.blobs:
            sums[group] += name_digest(name)
        return tuple(s % 2**64 for s in sums)


@dataclass(eq=False)
class Running:
    tokens: list[int]
    blocks: SequenceBlocks
    names: SequenceNames
    num_computed: int
    write_from: int
    mirror: list[list[int]]  # the tables as the runner knows them
    incoming: list[TransferHold] = field(default_factory=list)

    def content(self, position: int) -> tuple[int, ...]:
        return tuple(self.tokens[: position + 1])


class World:
    def __init__(
        self,
        groups: Sequence[KvGroup],
        num_blocks: int,
        eviction: str = "lru",
        watermark: float = 0.0,
        max_events: int = 1000,
    ) -> None:
        self.groups = tuple(groups)
        sizes = (num_blocks,) * len(groups)
        self.cache = KvCache(
            CacheConfig(
                self.groups, sizes, BLOCK_SIZE, CHUNK, eviction, watermark, max_events=max_events
            )
        )
        self.memory: list[list[list[object]]] = [
            [[None] * BLOCK_SIZE for _ in range(num_blocks)] for _ in groups
        ]
        self.running: list[Running] = []
        self.held: list[tuple[TransferHold, list[list[object]]]] = []
        self.stuck: list[TransferHold] = []
        self.index = Index(full_groups=tuple(self.full_groups()))

    def full_groups(self) -> list[int]:
        return [g for g, group in enumerate(self.groups) if group.window is None]

    def visible(self, group: int, position: int) -> range:
        window = self.groups[group].window
        return range(0 if window is None else max(0, position - window + 1), position + 1)

    def match(self, tokens: list[int]) -> Match:
        """The cache's answer, compared with a search of everything stored."""
        self.sync()
        names = SequenceNames(ROOT, BLOCK_SIZE).grow(tokens)
        match = self.cache.match(names, len(tokens))
        best = 0
        for depth in range(1, len(names) + 1):
            start = min(depth * BLOCK_SIZE, len(tokens) - 1)
            needed = {
                (names[p // BLOCK_SIZE], g)
                for g in range(len(self.groups))
                for p in self.visible(g, start)
                if p < depth * BLOCK_SIZE
            }
            if needed <= self.index.blobs.keys():
                best = depth
        assert match.num_blocks == best
        assert match.num_cached == best * BLOCK_SIZE
        assert match.num_tokens == min(match.num_cached, len(tokens) - 1)
        return match

    def admit(self, tokens: list[int], priority: int = 0) -> Running | None:
        match = self.match(tokens)
        if not self.cache.fits(match, len(tokens)):
            return None
        blocks = self.cache.open(match, priority=priority)
        names = SequenceNames(ROOT, BLOCK_SIZE)
        names.grow(tokens)
        sequence = Running(
            list(tokens),
            blocks,
            names,
            match.num_tokens,
            match.num_cached,
            [table.copy() for table in blocks.tables],
        )
        self.running.append(sequence)
        first = min(match.num_tokens + CHUNK, len(tokens) + 1)
        reserve = len(tokens) + BLOCK_SIZE
        assert self.extend(sequence, first, reserve_tokens=reserve), "fits, but does not"
        return sequence

    def extend(
        self, sequence: Running, num_tokens: int, reserve_tokens: int = 0, computed: int = 0
    ) -> bool:
        changes = self.cache.extend(
            sequence.blocks, num_tokens, reserve_tokens=reserve_tokens, computed=computed
        )
        if changes is None:
            return False
        self.apply(sequence, changes)
        for g in range(len(self.groups)):
            table = sequence.blocks.tables[g]
            seen_from = max(sequence.num_computed, computed)
            for p in range(seen_from, num_tokens):
                assert all(table[q // BLOCK_SIZE] for q in self.visible(g, p) if q < num_tokens)
        return True

    def apply(self, sequence: Running, changes: Sequence[TableChange]) -> None:
        for group, entry, block in changes:
            table = sequence.mirror[group]
            if block and entry >= len(table):
                table.extend([0] * (entry - len(table)))
                table.append(block)
                self.scrub(group, block)
            else:
                table[entry] = block
        for table, mirror in zip(sequence.blocks.tables, sequence.mirror, strict=True):
            assert table[: len(mirror)] == mirror
            assert not any(table[len(mirror) :])

    def scrub(self, group: int, block: int) -> None:
        """A newly taken block has nothing in it that anyone may still want."""
        for hold in [h for h, _ in self.held] + self.stuck:
            assert hold.group != group or block not in hold.blocks, "taken from a transfer"
        self.memory[group][block] = [None] * BLOCK_SIZE

    def compute(self, sequence: Running, count: int) -> bool:
        """One step of a sequence; False if there is no room for it."""
        start, end = sequence.num_computed, sequence.num_computed + count
        if not self.extend(sequence, end):
            self.assert_full(sequence, end)
            return False
        if end > sequence.write_from:
            copies = self.cache.make_writable(sequence.blocks, max(start, sequence.write_from))
            if copies is None:
                return False
            for group, entry, source, target in copies:
                self.scrub(group, target)
                self.memory[group][target] = self.memory[group][source].copy()
                sequence.mirror[group][entry] = target
        for position in range(start, end):
            self.compute_token(sequence, position)
        self.confirm(sequence, end)
        return True

    def finish_prompt(self, sequence: Running) -> bool:
        """All chunks that are left; a sequence that finds no room is released."""
        while sequence.num_computed < len(sequence.tokens):
            rest = len(sequence.tokens) - sequence.num_computed
            if not self.compute(sequence, min(rest, CHUNK)):
                self.release(sequence)
                return False
        return True

    def compute_token(self, sequence: Running, position: int) -> None:
        for g, table in enumerate(sequence.blocks.tables):
            if position >= sequence.write_from:
                block = table[position // BLOCK_SIZE]
                assert self.cache._pools[g].is_writable(block)
                self.memory[g][block][position % BLOCK_SIZE] = sequence.content(position)
            for p in self.visible(g, position):
                found = self.memory[g][table[p // BLOCK_SIZE]][p % BLOCK_SIZE]
                assert found == sequence.content(p), f"group {g}, query {position}, key {p}"

    def confirm(self, sequence: Running, num_computed: int) -> None:
        names = sequence.names.grow(sequence.tokens)
        self.apply(sequence, self.cache.advance(sequence.blocks, names, num_computed))
        sequence.num_computed = num_computed

    def assert_full(self, sequence: Running, num_tokens: int) -> None:
        """Some group really has fewer blocks than the sequence lacks."""
        last = -(-num_tokens // BLOCK_SIZE)
        assert any(
            stats.free + stats.cached < last - len(table)
            for stats, table in zip(self.cache.stats().groups, sequence.blocks.tables, strict=True)
        )

    def fork(self, sequence: Running) -> Running:
        blocks = self.cache.fork(sequence.blocks, sequence.num_computed)
        twin = Running(
            sequence.tokens[: sequence.num_computed],
            blocks,
            SequenceNames(ROOT, BLOCK_SIZE),
            sequence.num_computed,
            sequence.num_computed,
            [table.copy() for table in blocks.tables],
        )
        self.running.append(twin)
        return twin

    def release(self, sequence: Running) -> None:
        self.running.remove(sequence)
        self.cache.release(sequence.blocks)
        self.cache.release(sequence.blocks)

    def forget(self, tokens: list[int]) -> None:
        names = SequenceNames(ROOT, BLOCK_SIZE).grow(tokens)
        self.cache.forget(names)
        self.sync()
        for name, group in self.index.blobs:
            if name in names:
                block = self.cache._tree._nodes[name].blocks[group]
                assert self.cache._pools[group].owners(block)[0], "no sequence holds it"

    def receive(self, tokens: list[int]) -> Running | None:
        """A hand-off begins: blocks for the whole prompt, all of them written by transfers."""
        match = self.match(tokens)
        if not self.cache.fits(match, len(tokens)) or match.num_cached == len(tokens):
            return None
        blocks = self.cache.open(match)
        mirror = [table.copy() for table in blocks.tables]
        names = SequenceNames(ROOT, BLOCK_SIZE)
        sequence = Running(list(tokens), blocks, names, match.num_tokens, len(tokens), mirror)
        self.running.append(sequence)
        assert self.extend(sequence, len(tokens) + 1, computed=len(tokens)), "fits, but does not"
        for g, table in enumerate(blocks.tables):
            missing = [block for block in table[match.num_blocks :] if block]
            sequence.incoming.append(self.cache.transfers.hold(g, missing))
        return sequence

    def commit(self, sequence: Running) -> None:
        for hold in sequence.incoming:
            self.cache.transfers.drop(hold)
        sequence.incoming.clear()
        for position in range(sequence.num_computed, len(sequence.tokens)):
            for g, table in enumerate(sequence.blocks.tables):
                block = table[position // BLOCK_SIZE]
                if block:
                    content = sequence.content(position)
                    self.memory[g][block][position % BLOCK_SIZE] = content
        self.confirm(sequence, len(sequence.tokens))

    def abort(self, sequence: Running) -> None:
        """The sequence ends while READs into its blocks do not."""
        incoming = sequence.incoming
        self.release(sequence)
        for hold in incoming:
            self.cache.transfers.quarantine(hold)
        self.stuck += incoming

    def late_writes(self) -> None:
        for hold in self.stuck:
            for block in hold.blocks:
                self.memory[hold.group][block] = ["late"] * BLOCK_SIZE

    def send(self, group: int, blocks: list[int]) -> None:
        contents = [self.memory[group][block].copy() for block in blocks]
        self.held.append((self.cache.transfers.hold(group, blocks), contents))

    def sync(self) -> None:
        self.cache.events.flush()
        self.index.follow(self.cache)

    def check(self) -> None:
        self.cache.check_integrity([s.blocks for s in self.running])
        self.sync()
        stored = {(s.name, s.group): s.parent for s in self.cache._tree.stored()}
        assert stored == self.index.blobs
        for hold, contents in self.held:
            for block, content in zip(hold.blocks, contents, strict=True):
                now = self.memory[hold.group][block]
                assert all(a is None or a == b for a, b in zip(content, now, strict=True))
