"""Look-ups and evictions of the prefix tree, case by case; test_cache_random has the rest."""

from collections.abc import Sequence
from typing import overload

import pytest

from kv_cache.cache import KvCache
from kv_cache.config import CacheConfig
from kv_cache.events import Cleared, Gap, KvEvent, Removed, Stored
from kv_cache.layout import KvGroup
from kv_cache.names import BlockName, name_blocks, root_name
from kv_cache.sequence import SequenceBlocks
from tests.kv_cache.world import BLOCK_SIZE, CHUNK, full_group, window_group

ROOT = root_name("tree")
MANY = 1000


def make_cache(*groups: KvGroup, num_blocks: int = 100, eviction: str = "lru") -> KvCache:
    sizes = (num_blocks,) * len(groups)
    return KvCache(CacheConfig(groups, sizes, BLOCK_SIZE, CHUNK, eviction, watermark=0.0))


def names_of(tokens: Sequence[int]) -> list[BlockName]:
    return name_blocks(ROOT, tokens, BLOCK_SIZE)


def compute(cache: KvCache, tokens: Sequence[int], priority: int = 0) -> SequenceBlocks:
    """A sequence whose tokens are all computed, in one chunk."""
    names = names_of(tokens)
    blocks = cache.open(cache.match(names, len(tokens)), priority=priority)
    assert cache.extend(blocks, len(tokens)) is not None
    cache.advance(blocks, names, len(tokens))
    return blocks


def serve(cache: KvCache, tokens: Sequence[int], priority: int = 0) -> None:
    cache.release(compute(cache, tokens, priority))


def new_events(cache: KvCache, after: int) -> list[KvEvent]:
    cache.events.flush()
    batches = cache.events.since(after)
    assert not isinstance(batches, Gap)
    return [event for batch in batches for event in batch.events]


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    cache = make_cache(full_group())
    serve(cache, range(12))
    inside = cache.match(names_of(range(11)), 11)
    assert (inside.num_tokens, inside.num_cached, inside.num_blocks) == (8, 8, 2)
    longer = cache.match(names_of(range(13)), 13)
    assert (longer.num_tokens, longer.num_cached, longer.num_blocks) == (12, 12, 3)


def test_a_whole_prompt_hit_recomputes_one_token_and_not_a_block() -> None:
    cache = make_cache(full_group())
    serve(cache, range(12))
    match = cache.match(names_of(range(12)), 12)
    assert (match.num_tokens, match.num_cached, match.num_blocks) == (11, 12, 3)


@pytest.mark.parametrize(
    ("window", "lost", "hit_blocks"),
    [
        (4, {2}, 4),
        (5, {2}, 2),  # a query at 15 sees 11 .. 15, though one at 16 would not see block 2
        (5, {0, 1}, 4),
        (6, {2}, 2),
        (9, {0}, 4),
        (9, {1}, 1),
        (9, {0, 1}, 0),
        (1, {0, 1, 2}, 4),
        (1, {3}, 3),
    ],
)
def test_a_whole_prompt_hit_sees_one_token_further_back(
    window: int, lost: set[int], hit_blocks: int
) -> None:
    cache = make_cache(full_group(), window_group(window))
    names = names_of(range(16))
    serve(cache, range(16))
    for i in lost:
        cache._tree._forget(cache._tree._nodes[names[i]], 1)
    assert cache.match(names, 16).num_blocks == hit_blocks


def test_a_window_group_needs_only_the_blocks_that_are_seen() -> None:
    cache = make_cache(window_group(6))
    serve(cache, range(40))
    lost = set(evicted_names(cache, 0, times=6))
    names = names_of(range(40))
    assert lost == set(names[:6]), "given back first, evicted first"
    assert cache.match(names, 41).num_blocks == 10
    assert cache.match(names[:8], 33).num_blocks == 8, "sees blocks 6 and 7"
    assert cache.match(names[:7], 29).num_blocks == 0, "would see block 5"


def evict(cache: KvCache, group: int, times: int) -> list[KvEvent]:
    before = cache.events.flush()
    for _ in range(times):
        cache._tree.evict(group)
    return new_events(cache, before)


def evicted_names(cache: KvCache, group: int, times: int) -> list[BlockName]:
    return [e.name for e in evict(cache, group, times) if isinstance(e, Removed)]


def test_leaves_go_before_their_parents_and_older_branches_first() -> None:
    cache = make_cache(full_group())
    left, right = [0] * 4 + [1] * 8, [0] * 4 + [2] * 8
    serve(cache, left)
    serve(cache, right)
    order = evicted_names(cache, 0, times=5)
    assert order == [*names_of(left)[:0:-1], *names_of(right)[::-1]]


def test_use_makes_a_branch_young_again() -> None:
    cache = make_cache(full_group())
    left, right = [1] * 8, [2] * 8
    serve(cache, left)
    serve(cache, right)
    serve(cache, [*left, 9])
    assert evicted_names(cache, 0, times=2) == names_of(right)[::-1]


def test_urgent_sequences_keep_their_blocks_under_the_priority_policy() -> None:
    cache = make_cache(full_group(), eviction="priority")
    serve(cache, [1] * 8, priority=-5)
    serve(cache, [2] * 8, priority=5)
    serve(cache, [3] * 8, priority=0)
    order = evicted_names(cache, 0, times=6)
    assert order == [n for t in (2, 3, 1) for n in names_of([t] * 8)[::-1]]


def test_blocks_in_frequent_use_stay_under_the_frequency_policy() -> None:
    cache = make_cache(full_group(), eviction="frequency")
    for _ in range(4):
        serve(cache, [1] * 9)
    serve(cache, [2] * 9)
    assert evicted_names(cache, 0, times=2) == names_of([2] * 9)[::-1]


def test_the_window_partners_of_an_evicted_block_go_too_and_not_the_other_way() -> None:
    cache = make_cache(full_group(), window_group(6))
    serve(cache, range(12))
    names = names_of(range(12))
    assert evict(cache, 1, times=1) == [Removed(names[0], 1)]
    assert evict(cache, 0, times=1) == [Removed(names[2], 0), Removed(names[2], 1)]
    assert cache.stats().groups[1].cached == 1


def test_a_transfer_that_outlives_its_sequence_cannot_leave_an_orphan() -> None:
    """The child is held by a transfer alone, so its parent may be evicted before it."""
    cache = make_cache(full_group())
    blocks = compute(cache, range(12))
    child = blocks.tables[0][1]
    names = names_of(range(12))
    hold = cache.transfers.hold(0, [child])
    cache.release(blocks)
    assert evict(cache, 0, times=1) == [Removed(names[2], 0)]
    assert evict(cache, 0, times=1) == [Removed(names[1], 0), Removed(names[0], 0)]
    stats = cache.stats().groups[0]
    assert (stats.held, stats.cached) == (1, 0), "its bytes stay until the transfer ends"
    cache.transfers.drop(hold)
    assert cache.stats().groups[0].free == stats.total
    cache.check_integrity([])


def test_equal_blocks_are_kept_once() -> None:
    cache = make_cache(full_group())
    names = names_of(range(8))
    first, second = (cache.open(cache.match([], 8)) for _ in range(2))
    for blocks in (first, second):
        cache.extend(blocks, 9)
    cache.advance(first, names, 8)
    mine = list(second.tables[0])
    changes = cache.advance(second, names, 8)
    assert [(c.entry, c.block) for c in changes] == list(enumerate(first.tables[0][:2]))
    assert second.tables[0] == [*first.tables[0][:2], mine[2]]
    assert cache.stats().groups[0].held == 4
    cache.check_integrity([first, second])


def test_siblings_may_name_the_same_block() -> None:
    cache = make_cache(full_group())
    names = names_of(range(8))
    first = cache.open(cache.match([], 8))
    cache.extend(first, 8)
    second = cache.fork(first, 8)
    assert cache.advance(first, names, 8) == cache.advance(second, names, 8) == []
    assert first.tables == second.tables
    cache.check_integrity([first, second])


def test_a_window_blob_that_was_lost_is_stored_again() -> None:
    cache = make_cache(full_group(), window_group(6))
    serve(cache, range(8))
    evict(cache, 1, times=2)
    before = cache.events.flush()
    assert cache.match(names_of(range(8)), 8).num_blocks == 0
    serve(cache, range(8))
    names = names_of(range(8))
    assert new_events(cache, before) == [Stored(names[0], None, 1), Stored(names[1], names[0], 1)]
    assert cache.match(names, 8).num_cached == 8


class CountedNames(Sequence[BlockName]):
    """Counts how many names are looked at."""

    def __init__(self, names: list[BlockName]) -> None:
        self.names = names
        self.looked_at = 0

    @overload
    def __getitem__(self, index: int) -> BlockName: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockName]: ...
    def __getitem__(self, index: int | slice) -> BlockName | Sequence[BlockName]:
        self.looked_at += 1
        return self.names[index]

    def __len__(self) -> int:
        return len(self.names)


@pytest.mark.parametrize("num_hit", [0, 1, 2, 3, 511, 512, 513, 999, 1000])
def test_a_prefix_closed_look_up_gallops(num_hit: int) -> None:
    cache = make_cache(full_group(), num_blocks=1100)
    if num_hit:
        serve(cache, range(num_hit * BLOCK_SIZE))
    tokens = [*range(num_hit * BLOCK_SIZE), *range(10**6, 10**6 + BLOCK_SIZE * (MANY - num_hit))]
    names = CountedNames(names_of(tokens))
    assert cache.match(names, len(tokens) + 1).num_blocks == num_hit
    assert names.looked_at <= 2 * MANY.bit_length() + 1


def test_a_window_look_up_asks_for_each_block_once() -> None:
    """The worst case: one group has all of its long reach, the other one never has its own."""
    cache = make_cache(window_group(30), window_group(2), num_blocks=1100)
    tokens = range(MANY * BLOCK_SIZE)
    serve(cache, tokens)
    names = names_of(tokens)
    for name in names:
        cache._tree._forget(cache._tree._nodes[name], 1)
    counted = CountedNames(names)
    assert cache.match(counted, len(tokens) + 1).num_blocks == 0
    assert counted.looked_at <= 2 * MANY


def test_reset_forgets_what_nobody_holds_and_tells_what_is_left() -> None:
    cache = make_cache(full_group())
    serve(cache, range(8))
    live = compute(cache, range(100, 112))
    before = cache.events.flush()
    cache.reset()
    cleared, *left = new_events(cache, before)
    names = names_of(range(100, 112))
    assert isinstance(cleared, Cleared)
    assert left == [Stored(n, p, 0) for n, p in zip(names, [None, *names], strict=False)]
    assert cache.match(names_of(range(8)), 8).num_blocks == 0
    cache.check_integrity([live])
