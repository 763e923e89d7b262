"""An index that follows a worker, against what the worker holds."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache.cache import KvCache
from kv_cache.config import CacheConfig
from kv_cache.events import (
    DIGEST_MODULUS,
    Cleared,
    EventBatch,
    EventLog,
    Gap,
    Removed,
    Snapshot,
    Stored,
    name_digest,
)
from kv_cache.layout import KvGroup
from kv_cache.names import BlockName, name_blocks, root_name
from router.ask import key_of
from router.held import BadEvents
from router.worker_index import NOTHING, Match, Outcome, Position, WorkerIndex
from router.workers import CacheShape
from tests.kv_cache.world import BLOCK_SIZE, CHUNK, full_group, window_group

ROOT = root_name("index")
SHAPE = CacheShape(BLOCK_SIZE, 1)
NAMES = name_blocks(ROOT, range(BLOCK_SIZE * 12), BLOCK_SIZE)
KEYS = [key_of(name) for name in NAMES]
INCARNATION = 7


class Worker:
    """What a worker tells of one group, with whatever goes wrong on the way."""

    def __init__(self, incarnation: int = INCARNATION) -> None:
        self.log = EventLog(1, incarnation, max_events=10_000)
        self.stored: dict[BlockName, Stored] = {}

    def store(self, *numbers: int) -> EventBatch:
        for number in numbers:
            one = Stored(NAMES[number], NAMES[number - 1] if number else None, 0)
            self.stored[one.name] = one
            self.log.stored(one.name, one.parent, 0)
        return self.close()

    def remove(self, *numbers: int) -> EventBatch:
        for number in numbers:
            del self.stored[NAMES[number]]
            self.log.removed(NAMES[number], 0)
        return self.close()

    def close(self) -> EventBatch:
        self.log.flush()
        return self.since(self.log.latest - 1)[0]

    def since(self, number: int) -> Sequence[EventBatch]:
        batches = self.log.since(number)
        assert not isinstance(batches, Gap)
        return batches

    def snapshot(self) -> Snapshot:
        return self.log.snapshot(list(self.stored.values()))


def follow(index: WorkerIndex, *batches: EventBatch) -> list[Outcome]:
    return [index.apply(batch) for batch in batches]


def held(index: WorkerIndex) -> int:
    return index.match(KEYS, 0.0).num_held


def test_the_first_words_of_a_worker_need_no_snapshot() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    assert follow(index, worker.store(0, 1), worker.store(2)) == [Outcome.APPLIED] * 2
    assert index.match(KEYS, 0.0) == Match(3, 3)
    assert index.resume() == (INCARNATION, 2)


def test_a_worker_that_has_said_much_already_is_asked_for_a_snapshot() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    worker.store(0)
    assert index.resume() == Position()
    assert index.apply(worker.store(1)) is Outcome.INCARNATION
    assert Outcome.INCARNATION.needs_snapshot
    assert index.resume() == Position()
    assert index.apply_part(worker.snapshot(), complete=True) is Outcome.APPLIED
    assert held(index) == 2
    assert index.apply(worker.store(2)) is Outcome.APPLIED


def test_what_comes_twice_is_ignored_and_what_comes_early_is_a_gap() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    one, two, three = worker.store(0), worker.store(1), worker.remove(1)
    assert follow(index, one, two, two, one) == [
        Outcome.APPLIED,
        Outcome.APPLIED,
        Outcome.DUPLICATE,
        Outcome.DUPLICATE,
    ]
    four = worker.store(1, 2)
    assert index.apply(four) is Outcome.GAP
    assert held(index) == 2, "nothing of it counts, and nothing is forgotten"
    assert index.resume() == (INCARNATION, 2), "the worker may still have what is missing"
    assert follow(index, three, four) == [Outcome.APPLIED] * 2
    assert held(index) == 3


def test_another_process_is_another_cache() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    follow(index, worker.store(0, 1))
    index.predict(KEYS[:6], until=9.0)
    reborn = Worker(INCARNATION + 1)
    reborn.store(5)
    assert index.apply(reborn.store(0)) is Outcome.INCARNATION
    assert index.match(KEYS, 0.0) == NOTHING
    assert (len(index), index.resume()) == (0, Position())
    assert index.apply_part(reborn.snapshot(), complete=True) is Outcome.APPLIED
    assert held(index) == 1
    again = Worker(INCARNATION + 2)
    assert index.apply(again.store(0, 1, 2)) is Outcome.APPLIED, "its first words"
    assert held(index) == 3


@pytest.mark.parametrize("lie", [(), (1, 1), (2,), (1, 2)])
def test_the_digest_says_when_something_is_wrong(lie: Sequence[int]) -> None:
    """The worker stored block 1; lost, told twice, another one, one too many."""
    worker, index = Worker(), WorkerIndex(SHAPE)
    follow(index, worker.store(0))
    batch = worker.store(1)
    events = tuple(Stored(NAMES[number], NAMES[number - 1], 0) for number in lie)
    if lie == (1, 1):
        double = 2 * name_digest(NAMES[1]) + name_digest(NAMES[0])
        batch = replace(batch, digests=(double % DIGEST_MODULUS,))
    assert index.apply(replace(batch, events=events)) is Outcome.DIGEST
    assert index.resume() == Position()
    assert index.apply(worker.store(3)) is Outcome.DIGEST, "until a snapshot has come"
    assert held(index) >= 1, "what may be wrong is better than nothing"
    assert index.apply_part(worker.snapshot(), complete=True) is Outcome.APPLIED
    assert held(index) == 2
    assert index.counts[Outcome.DIGEST] == 2


def test_a_removal_of_what_is_not_there_is_no_secret() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    follow(index, worker.store(0))
    batch = replace(worker.store(1), events=(Removed(NAMES[5], 0),))
    assert index.apply(batch) is Outcome.DIGEST


def test_parts_of_a_snapshot_count_all_at_once() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    follow(index, worker.store(0))
    for number in range(1, 9):
        worker.store(number)
    whole = worker.snapshot()
    parts = [replace(whole, stored=whole.stored[i : i + 3]) for i in (0, 3, 6)]
    assert index.apply_part(parts[0], complete=False) is Outcome.PART
    assert held(index) == 1
    index.resume()  # it broke off; the next stream begins with a snapshot of its own
    assert index.apply_part(parts[0], complete=False) is Outcome.PART
    assert index.apply_part(parts[1], complete=False) is Outcome.PART
    assert held(index) == 1
    assert index.apply_part(parts[2], complete=True) is Outcome.APPLIED
    assert (held(index), index.resume().number) == (9, whole.number)


def test_a_snapshot_without_one_of_its_parts_does_not_count() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    follow(index, worker.store(0, 1))
    worker.store(2, 3)
    whole = worker.snapshot()
    part = replace(whole, stored=whole.stored[2:])
    assert index.apply_part(part, complete=True) is Outcome.DIGEST
    assert held(index) == 2
    assert index.resume() == Position()


def test_a_snapshot_of_the_past_does_not_count() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    follow(index, worker.store(0))
    old = worker.snapshot()
    follow(index, worker.store(1))
    assert index.apply_part(old, complete=True) is Outcome.DUPLICATE
    assert held(index) == 2


def test_a_worker_that_tells_of_more_than_it_has_room_for_is_forgotten() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE, capacity=3)
    assert follow(index, worker.store(0, 1, 2), worker.store(3)) == [
        Outcome.APPLIED,
        Outcome.OVERFULL,
    ]
    assert (len(index), index.resume()) == (0, Position())
    assert index.apply_part(worker.snapshot(), complete=False) is Outcome.OVERFULL
    assert len(index) == 0
    worker.remove(3)
    assert index.apply_part(worker.snapshot(), complete=True) is Outcome.APPLIED
    assert held(index) == 3


def test_everything_may_be_gone_at_once() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    follow(index, worker.store(0, 1, 2))
    worker.log.cleared()
    worker.stored.clear()
    assert index.apply(worker.store(0)) is Outcome.APPLIED
    assert held(index) == 1


@pytest.mark.parametrize(
    "change", [{"events": (Stored(NAMES[1], None, 1),)}, {"digests": ()}], ids=["group", "digests"]
)
def test_what_cannot_be_is_an_error_and_leads_to_a_snapshot(change: dict[str, object]) -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    follow(index, worker.store(0))
    snapshot = worker.snapshot()
    batch = replace(worker.store(1), **change)  # type: ignore[arg-type]
    with pytest.raises(BadEvents, match=r"group|digests"):
        index.apply(batch)
    assert index.resume() == Position()
    assert held(index) == 1
    bad = {"stored": change["events"]} if "events" in change else change
    with pytest.raises(BadEvents):
        index.apply_part(replace(snapshot, **bad), complete=True)  # type: ignore[arg-type]
    assert index.apply_part(worker.snapshot(), complete=True) is Outcome.APPLIED


def test_other_groups_are_not_followed() -> None:
    index = WorkerIndex(SHAPE._replace(group=1))
    log = EventLog(2, INCARNATION, max_events=10)
    log.stored(NAMES[0], None, 1)
    log.stored(NAMES[0], None, 0)
    log.stored(NAMES[1], NAMES[0], 0)
    log.flush()
    assert index.apply(log.since(0)[0]) is Outcome.APPLIED  # type: ignore[index]
    assert index.match(KEYS, 0.0) == Match(1, 1)


def test_what_was_predicted_is_there_until_its_time_and_no_source() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    follow(index, worker.store(0, 1))
    index.predict(KEYS[:6], until=5.0)
    assert index.match(KEYS, 4.9) == Match(6, 2)
    follow(index, worker.store(2, 3))
    assert index.match(KEYS, 4.9) == Match(6, 4)
    assert index.match(KEYS, 5.0) == Match(4, 4)


def test_what_was_confirmed_and_then_evicted_is_not_there() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    index.predict(KEYS[:2], until=5.0)
    follow(index, worker.store(0, 1), worker.remove(1))
    assert index.match(KEYS, 0.0) == Match(1, 1)
    index.predict(KEYS[:4], until=5.0)
    index.apply_part(worker.snapshot(), complete=True)
    assert index.match(KEYS, 0.0).num_blocks == 4, "a snapshot from before it arrived"


def test_a_snapshot_confirms_too() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    index.predict(KEYS[:3], until=5.0)
    worker.store(0, 1)
    index.apply_part(worker.snapshot(), complete=True)
    assert index.match(KEYS, 0.0) == Match(3, 2), "made before the first word"
    index.apply(worker.remove(1))
    assert index.match(KEYS, 0.0) == Match(1, 1)


def test_of_a_window_only_the_blocks_that_are_read_count() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE._replace(window=2 * BLOCK_SIZE + 1))
    follow(index, worker.store(0, 5, 6, 9))
    assert index.match(KEYS, 0.0) == Match(7, 7)
    index.predict(KEYS[:10], until=1.0)
    assert index.match(KEYS, 0.9) == Match(10, 7)
    assert index.match(KEYS, 1.0) == Match(7, 7)


# Prompts of few tokens, so that many begin alike; the cache holds about four of them.
prompts = st.lists(st.integers(0, 1), max_size=10).map(
    lambda digits: [d for digit in digits for d in (digit,) * BLOCK_SIZE]
)


@pytest.mark.parametrize("group", [full_group(), window_group(5), window_group(9)], ids=str)
@settings(max_examples=60)
@given(data=st.data())
def test_it_knows_what_the_cache_knows(group: KvGroup, data: st.DataObject) -> None:
    """A real cache that stores and evicts, and a stream that loses, repeats and breaks off."""
    config = CacheConfig((group,), (41,), BLOCK_SIZE, CHUNK, incarnation=3, max_events=60)
    cache = KvCache(config)
    index = WorkerIndex(CacheShape(BLOCK_SIZE, 1, 0, group.window), capacity=40)
    for _ in range(data.draw(st.integers(1, 12))):
        serve(cache, data.draw(prompts))
        if data.draw(st.booleans()):
            hear(index, cache, data)
    repair(index, cache)
    for tokens in data.draw(st.lists(prompts, min_size=1, max_size=5)):
        names = name_blocks(ROOT, tokens, BLOCK_SIZE)
        keys = [key_of(name) for name in names]
        match = index.match(keys, 0.0)
        assert match.num_blocks == cache.match(names, len(tokens) + 1).num_blocks
        assert match.num_held == match.num_blocks


def serve(cache: KvCache, tokens: Sequence[int]) -> None:
    names = name_blocks(ROOT, tokens, BLOCK_SIZE)
    prompt = [*tokens, 9]
    blocks = cache.open(cache.match(names, len(prompt)))
    for end in (*range(CHUNK, len(prompt), CHUNK), len(prompt)):
        assert cache.extend(blocks, end) is not None
        cache.advance(blocks, names, end)
    cache.release(blocks)
    cache.events.flush()


def hear(index: WorkerIndex, cache: KvCache, data: st.DataObject) -> None:
    batches = cache.events.since(index.resume().number)
    if isinstance(batches, Gap):
        return
    for batch in data.draw(st.permutations(batches + batches[:2])):
        if data.draw(st.integers(0, 9)) == 0:
            batch = replace(batch, events=batch.events[1:])
        index.apply(batch)


def repair(index: WorkerIndex, cache: KvCache) -> None:
    """As whoever follows does: from where it stands, and by a snapshot where it is told to."""
    incarnation, number = index.resume()
    batches = cache.events.since(number) if incarnation else Gap()
    outcomes = [] if isinstance(batches, Gap) else follow(index, *batches)
    if isinstance(batches, Gap) or any(outcome.needs_snapshot for outcome in outcomes):
        assert index.apply_part(cache.snapshot(), complete=True) is Outcome.APPLIED
    assert len(index) == len(cache.snapshot().stored)


def test_events_of_a_clear_are_the_last_word() -> None:
    worker, index = Worker(), WorkerIndex(SHAPE)
    follow(index, worker.store(0, 1))
    batch = EventBatch(INCARNATION, 2, (Stored(NAMES[2], None, 0), Cleared()), (0,))
    assert index.apply(batch) is Outcome.APPLIED
    assert len(index) == 0
