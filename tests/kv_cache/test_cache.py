"""What the scheduler is promised, case by case; test_cache_random has the rest."""

from typing import Any

import pytest

from kv_cache.cache import KvCache
from kv_cache.config import CacheConfig, blocks_needed
from kv_cache.errors import CacheError
from kv_cache.layout import KvGroup
from kv_cache.sequence import CopyOnWrite, SequenceBlocks, TableChange
from kv_cache.tree import Match
from tests.kv_cache.test_tree import compute, make_cache, names_of, serve
from tests.kv_cache.world import BLOCK_SIZE, CHUNK, full_group, window_group


def unknown(cache: KvCache, num_tokens: int) -> Match:
    return cache.match([], num_tokens)


def start(cache: KvCache, num_tokens: int) -> SequenceBlocks:
    blocks = cache.open(unknown(cache, num_tokens))
    assert cache.extend(blocks, num_tokens) is not None
    return blocks


def test_a_prompt_fits_with_one_more_block() -> None:
    cache = make_cache(full_group(), num_blocks=5)
    assert cache.fits(unknown(cache, 12), 12)
    assert not cache.fits(unknown(cache, 13), 13)
    assert cache.ever_fits(12)
    assert not cache.ever_fits(13)


def test_a_hit_needs_only_the_rest_but_its_own_blocks_are_not_room() -> None:
    cache = make_cache(full_group(), num_blocks=9)
    serve(cache, range(12))
    busy = start(cache, 12)
    assert cache.stats().groups[0].free == 2
    match = cache.match(names_of(range(13)), 13)
    assert match.num_blocks == 3
    assert cache.fits(match, 16), "one more and one to grow are free"
    assert not cache.fits(match, 17), "the three that the hit pins cannot be evicted for it"
    assert cache.fits(unknown(cache, 16), 16), "another prompt may evict them"
    cache.release(busy)
    assert cache.fits(match, 17)


def test_what_others_hold_of_a_hit_is_not_counted_twice() -> None:
    cache = make_cache(full_group(), num_blocks=6)
    first = compute(cache, range(12))
    match = cache.match(names_of(range(13)), 13)
    assert cache.fits(match, 13)
    blocks = cache.open(match)
    assert cache.extend(blocks, 13 + BLOCK_SIZE) is not None
    cache.check_integrity([first, blocks])


def test_a_window_group_is_counted_with_what_it_holds_at_once() -> None:
    group = window_group(6)
    needed = blocks_needed(group, BLOCK_SIZE, 10_000, CHUNK)
    assert needed == 2 + 2 + 1
    cache = make_cache(group, num_blocks=needed + 1)
    assert cache.ever_fits(10_000)
    assert cache.fits(unknown(cache, 10_000), 10_000)
    blocks = cache.open(unknown(cache, 10_000))
    for computed in range(0, 10_000 - CHUNK, CHUNK - 3):
        assert cache.extend(blocks, computed + CHUNK) is not None
        cache.advance(blocks, [], computed + CHUNK - 3)
    assert not make_cache(group, num_blocks=needed).ever_fits(10_000)


def test_admissions_leave_the_watermark_to_growth_unless_nothing_is_held() -> None:
    config = CacheConfig((full_group(),), (11,), BLOCK_SIZE, CHUNK, watermark=0.5)
    cache = KvCache(config)
    assert cache.fits(unknown(cache, 36), 36)
    small = start(cache, 4)
    assert cache.fits(unknown(cache, 12), 12)
    assert not cache.fits(unknown(cache, 13), 13)
    assert cache.extend(small, 40) is not None, "growth may use it all"


def test_extending_is_for_all_groups_or_none() -> None:
    sizes = (9, 4)
    cache = KvCache(CacheConfig((full_group(), window_group(100)), sizes, BLOCK_SIZE, CHUNK))
    blocks = start(cache, 8)
    before = [list(table) for table in blocks.tables]
    assert cache.extend(blocks, 17) is None
    assert [list(table) for table in blocks.tables] == before
    assert cache.stats().groups[0].free == 6
    assert cache.extend(blocks, 12) == [
        TableChange(0, 2, blocks.tables[0][2]),
        TableChange(1, 2, blocks.tables[1][2]),
    ]


def test_only_full_attention_groups_reserve_the_prompt() -> None:
    cache = make_cache(full_group(), window_group(6))
    blocks = cache.open(unknown(cache, 40))
    cache.extend(blocks, CHUNK, reserve_tokens=40)
    assert [len(table) for table in blocks.tables] == [10, 2]
    assert blocks.capacity == 8


def test_what_comes_from_elsewhere_takes_no_blocks_behind_the_window() -> None:
    cache = make_cache(full_group(), window_group(6))
    serve(cache, range(16))
    names = names_of(range(40))
    blocks = cache.open(cache.match(names, 40))
    cache.extend(blocks, 41, computed=40)
    full, window = blocks.tables
    assert all(full)
    assert len(full) == len(window) == 11
    assert [bool(b) for b in window] == [False] * 8 + [True] * 3
    cache.advance(blocks, names, 40)
    cache.check_integrity([blocks])
    cache.release(blocks)
    assert cache.match(names, 41).num_blocks == 10
    assert cache.match(names[:9], 37).num_blocks == 4, "the window blobs of 7 never came"


def test_chunks_that_arrive_late_bring_nothing_back_behind_the_window() -> None:
    cache = make_cache(full_group(), window_group(6))
    names = names_of(range(40))
    blocks = cache.open(cache.match(names, 40))
    cache.extend(blocks, 41, computed=40)
    held = list(blocks.tables[1])
    for num_computed in (16, 32, 40):
        assert cache.advance(blocks, names, num_computed) == []
        cache.check_integrity([blocks])
    assert blocks.tables[1] == held
    assert blocks.num_named == 10


def test_decoding_returns_at_once_where_nothing_changes() -> None:
    cache = make_cache(full_group(), window_group(6))
    blocks = start(cache, 13)
    cache.advance(blocks, [], 13)
    assert (blocks.capacity, blocks.next_advance) == (16, 16)
    assert cache.extend(blocks, 16) == ()
    assert cache.advance(blocks, [], 15) == ()


def test_blocks_behind_the_window_are_freed_as_soon_as_they_are() -> None:
    cache = make_cache(window_group(6))
    blocks = start(cache, 20)
    for computed in range(1, 20):
        changes = cache.advance(blocks, [], computed)
        # The query at `computed` sees 5 tokens before itself.
        gone = max(0, computed - 5) // BLOCK_SIZE
        assert blocks.tables[0][:gone] == [0] * gone
        assert all(blocks.tables[0][gone:])
        assert [tuple(c) for c in changes] in ([], [(0, gone - 1, 0)])


def test_without_names_nothing_is_stored() -> None:
    cache = make_cache(full_group())
    blocks = start(cache, 20)
    cache.advance(blocks, [], 20)
    cache.release(blocks)
    assert cache.match(names_of(range(20)), 20).num_blocks == 0
    assert cache.stats().groups[0].free == cache.stats().groups[0].total
    assert cache.events.flush() == 0


def test_a_block_is_not_found_before_it_is_computed() -> None:
    cache = make_cache(full_group())
    names = names_of(range(16))
    blocks = start(cache, 16)
    cache.advance(blocks, names, 7)
    assert cache.match(names, 16).num_blocks == 1
    cache.advance(blocks, names, 16)
    assert cache.match(names, 16).num_blocks == 4


def test_a_fork_copies_the_partial_block_when_it_writes() -> None:
    cache = make_cache(full_group(), window_group(6))
    first = start(cache, 10)
    cache.advance(first, names_of(range(10)), 10)
    second = cache.fork(first, 10)
    assert second.tables == first.tables
    shared = [table[2] for table in first.tables]
    copies = cache.make_writable(first, 10)
    assert copies == [CopyOnWrite(g, 2, shared[g], first.tables[g][2]) for g in range(2)]
    assert [table[2] for table in second.tables] == shared
    assert cache.make_writable(second, 10) == [], "the last one keeps the original"
    assert cache.make_writable(first, 11) == ()
    cache.check_integrity([first, second])


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    cache = make_cache(full_group())
    first = start(cache, 8)
    cache.advance(first, names_of(range(8)), 8)
    second = cache.fork(first, 8)
    for blocks in (first, second):
        cache.extend(blocks, 9)
        assert cache.make_writable(blocks, 8) == ()
    assert first.tables[0][2] != second.tables[0][2]


def test_a_fork_does_not_share_room_that_was_reserved() -> None:
    cache = make_cache(full_group())
    first = cache.open(unknown(cache, 6))
    cache.extend(first, 6, reserve_tokens=16)
    second = cache.fork(first, 6)
    assert len(second.tables[0]) == 2
    assert second.capacity == 8
    cache.check_integrity([first, second])


def test_a_copy_that_finds_no_block_changes_nothing() -> None:
    cache = make_cache(full_group(), num_blocks=3)
    first = start(cache, 6)
    second = cache.fork(first, 6)
    assert cache.make_writable(second, 6) is None
    assert second.tables == first.tables
    cache.release(first)
    assert cache.make_writable(second, 6) == []


def test_an_older_branch_of_a_fork_is_not_written_once_it_is_named() -> None:
    """The first sequence went on, named the block and left; the fork still holds it."""
    cache = make_cache(full_group())
    first = start(cache, 8)
    second = cache.fork(first, 6)
    cache.advance(first, names_of(range(8)), 8)
    cache.release(first)
    (copy,) = cache.make_writable(second, 6) or ()
    assert copy.source != copy.target
    assert cache.match(names_of(range(8)), 8).num_blocks == 2
    cache.check_integrity([second])


def test_an_abort_during_a_transfer_frees_nothing_that_it_writes() -> None:
    cache = make_cache(full_group())
    blocks = start(cache, 12)
    hold = cache.transfers.hold(0, blocks.tables[0])
    cache.release(blocks)
    assert cache.stats().groups[0].held == 3
    cache.transfers.quarantine(hold)
    assert cache.stats().groups[0].quarantined == 3
    cache.reset()
    cache.check_integrity([])
    with pytest.raises(KeyError):
        cache.transfers.drop(hold)
    cache.transfers.end_quarantine(hold)
    assert cache.stats().groups[0].free == cache.stats().groups[0].total


def test_a_stale_match_is_our_bug() -> None:
    cache = make_cache(full_group(), num_blocks=4)
    serve(cache, range(12))
    match = cache.match(names_of(range(12)), 12)
    start(cache, 4)
    with pytest.raises(AssertionError, match="evicted since"):
        cache.open(match)


def test_stats_count_every_block_once() -> None:
    cache = make_cache(full_group())
    serve(cache, range(10))
    blocks = compute(cache, range(12))
    again = cache.open(cache.match(names_of(range(12)), 12))
    (group,) = cache.stats().groups
    assert group.free + group.held + group.cached + group.quarantined == group.total
    assert (group.held, group.evicted) == (3, 0)
    cache.check_integrity([blocks, again])


def test_a_reference_that_nobody_explains_is_found() -> None:
    cache = make_cache(full_group())
    blocks = start(cache, 12)
    cache.check_integrity([blocks])
    for wrong in ([], [blocks, blocks]):
        with pytest.raises(AssertionError):
            cache.check_integrity(wrong)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("groups", (), "groups: a cache needs at least one"),
        ("num_blocks", (5, 5), r"num_blocks: \(5, 5\), must have one for each group"),
        ("num_blocks", (1,), "num_blocks: 1, must be at least 2"),
        ("block_size", 0, "block_size: 0, must be at least 1"),
        ("max_chunk_tokens", 0, "max_chunk_tokens: 0, must be at least 1"),
        ("max_events", 0, "max_events: 0, must be at least 1"),
        ("watermark", 1.0, "watermark: 1.0, must be at least 0 and less than 1"),
        ("watermark", -0.1, "watermark: -0.1, must be at least 0"),
        ("eviction", "mru", "eviction: no policy 'mru'"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(field: str, value: Any, message: str) -> None:
    groups: tuple[KvGroup, ...] = (full_group(),)
    good = {"groups": groups, "num_blocks": (5,), "block_size": 4, "max_chunk_tokens": 8}
    with pytest.raises(CacheError, match=message):
        KvCache(CacheConfig(**{**good, field: value}))
