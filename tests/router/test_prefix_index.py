"""Many workers' caches, and which of them has most of a prompt."""

import gc
import random
import sys

import pytest

from kv_cache.events import EventBatch, EventLog, Gap, Stored, name_digest
from kv_cache.names import BlockName
from router.held import Held
from router.prefix_index import PrefixIndex
from router.worker_index import NOTHING, Match, Outcome
from router.workers import CacheShape, Worker

SHAPE = CacheShape(16, 1)
NAMES = [BlockName(bytes([number]) * 16) for number in range(20)]
KEYS = [name_digest(name) & (2**60 - 1) for name in NAMES]
A, B, C = (Worker(address, 1, "f") for address in "abc")


def give(index: PrefixIndex, worker: Worker, num_blocks: int) -> None:
    events = tuple(Stored(name, None, 0) for name in NAMES[:num_blocks])
    digest = sum(map(name_digest, NAMES[:num_blocks])) % 2**64
    outcome = index.of(worker).apply(EventBatch(1, 1, events, (digest,)))
    assert outcome is Outcome.APPLIED


def test_every_worker_answers_for_itself() -> None:
    index = PrefixIndex(SHAPE)
    give(index, A, 5)
    give(index, B, 9)
    index.of(A).predict(KEYS[:12], until=1.0)
    unknown = Worker("d", 1, "f")
    assert index.matches([B, unknown, A], KEYS, 0.0) == [Match(9, 9), NOTHING, Match(12, 5)]
    assert index.matches([A], KEYS, 1.0) == [Match(5, 5)]
    assert len(index) == 14


def test_another_incarnation_is_another_worker() -> None:
    index = PrefixIndex(SHAPE)
    give(index, A, 5)
    assert index.matches([A._replace(incarnation=2)], KEYS, 0.0) == [NOTHING]


def test_who_is_gone_holds_nothing() -> None:
    index = PrefixIndex(SHAPE)
    give(index, A, 5)
    give(index, B, 2)
    index.remove(A)
    index.remove(C)
    assert index.matches([A, B], KEYS, 0.0) == [NOTHING, Match(2, 2)]
    assert len(index) == 2


def batch_of(number: int, log: EventLog) -> EventBatch:
    batches = log.since(number - 1)
    assert not isinstance(batches, Gap)
    return batches[0]


@pytest.mark.parametrize("num_held", [1000, 1365, 1366, 5461, 7000, 21_845, 21_846, 24_000])
def test_an_entry_takes_no_more_room_however_much_comes_and_goes(num_held: int) -> None:
    """A dict that is left to itself takes 120 bytes an entry, and 32 for its key."""
    draw = random.Random(1)
    log, held, there = EventLog(1, 1, max_events=200), Held(0), list[BlockName]()
    most = 0.0
    for number in range(1, 4 * num_held // 50):
        for _ in range(50):
            name = BlockName(draw.randbytes(16))
            log.stored(name, None, 0)
            there.append(name)
            if len(there) > num_held:
                at = draw.randrange(len(there))
                there[at], there[-1] = there[-1], there[at]
                log.removed(there.pop(), 0)
        log.flush()
        batch = batch_of(number, log)
        held.apply(batch.events, 1)
        assert held.digest == batch.digests[0]
        if len(held) == num_held:
            most = max(most, sys.getsizeof(held.keys) / num_held)
    assert len(held) == num_held == len(held.keys)
    assert 30 < most + sys.getsizeof(2**60 - 1) <= 100


def test_the_garbage_collector_has_nothing_to_do_with_entries() -> None:
    index = PrefixIndex(SHAPE)
    give(index, A, 7)
    assert not gc.is_tracked(index.of(A)._held.keys)
