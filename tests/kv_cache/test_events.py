"""The event log: what a subscriber can rely on, whenever it looks."""

from collections import deque
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from kv_cache.events import (
    Cleared,
    EventBatch,
    EventLog,
    Gap,
    Removed,
    Snapshot,
    Stored,
    name_digest,
)
from kv_cache.names import BlockName
from tests.kv_cache.world import Index


def name(i: int) -> BlockName:
    return BlockName(i.to_bytes(16, "little"))


def batches(log: EventLog, after: int) -> list[EventBatch]:
    found = log.since(after)
    assert isinstance(found, list)
    return found


# What the cache does, and what each of two subscribers does beside it.
operations = st.lists(
    st.one_of(
        st.tuples(st.just("toggle"), st.integers(0, 5), st.integers(0, 1)),
        st.tuples(st.sampled_from(["flush", "clear"]), st.just(0), st.just(0)),
        st.tuples(st.sampled_from(["follow", "join"]), st.integers(0, 1), st.just(0)),
    ),
    max_size=60,
)


class Source:
    """As much of a cache as a subscriber sees."""

    def __init__(self, max_events: int) -> None:
        self.events = EventLog(2, 7, max_events)
        self.blobs: dict[tuple[BlockName, int], None] = {}

    def toggle(self, key: tuple[BlockName, int]) -> None:
        if key in self.blobs:
            del self.blobs[key]
            self.events.removed(*key)
        else:
            self.blobs[key] = None
            self.events.stored(key[0], None, key[1])

    def snapshot(self) -> Snapshot:
        return self.events.snapshot(Stored(n, None, g) for n, g in self.blobs)


@given(operations, st.integers(1, 8))
def test_a_subscriber_that_misses_batches_ends_with_what_is_stored(
    ops: list[tuple[str, int, int]], max_events: int
) -> None:
    source = Source(max_events)
    subscribers = [Index(), Index()]
    for op, i, group in ops:
        match op:
            case "toggle":
                source.toggle((name(i), group))
            case "flush":
                source.events.flush()
            case "clear":
                source.blobs.clear()
                source.events.cleared()
            case "follow":
                subscribers[i].follow(source)
            case "join":
                subscribers[i] = Index(seen=-1)
    source.events.flush()
    for subscriber in subscribers:
        subscriber.follow(source)
        assert subscriber.blobs.keys() == source.blobs.keys()
        assert subscriber.digests(2) == source.events.digests


def test_a_step_is_one_batch_in_order_with_the_digest_after_it() -> None:
    log = EventLog(2, 7, 100)
    log.stored(name(1), None, 0)
    log.stored(name(2), name(1), 1)
    log.removed(name(1), 0)
    assert log.flush() == 1
    assert log.flush() == 1, "nothing happened"
    (batch,) = batches(log, 0)
    assert (batch.incarnation, batch.number) == (7, 1)
    assert batch.events == (
        Stored(name(1), None, 0),
        Stored(name(2), name(1), 1),
        Removed(name(1), 0),
    )
    assert batch.digests == (0, 2)


def test_old_batches_leave_a_gap() -> None:
    log = EventLog(1, 7, 3)
    for i in range(5):
        log.stored(name(i), None, 0)
        log.flush()
    assert log.since(1) == Gap()
    assert [b.number for b in batches(log, 2)] == [3, 4, 5]
    assert log.since(5) == []
    assert log.since(6) == Gap(), "a number of another life"


class Walked(deque[EventBatch]):
    """Counts what is looked at."""

    num_seen = 0

    def __iter__(self) -> Iterator[EventBatch]:
        return self._counted(super().__iter__())

    def __reversed__(self) -> Iterator[EventBatch]:
        return self._counted(super().__reversed__())

    def _counted(self, batches: Iterator[EventBatch]) -> Iterator[EventBatch]:
        for batch in batches:
            self.num_seen += 1
            yield batch


def test_who_follows_closely_costs_what_is_new() -> None:
    log = EventLog(1, 7, 100)
    log._batches = walked = Walked()
    for i in range(100):
        log.stored(name(i), None, 0)
        log.flush()
    assert [b.number for b in batches(log, 98)] == [99, 100]
    assert walked.num_seen == 2


def test_a_batch_larger_than_the_ring_is_a_gap_and_not_a_leak() -> None:
    log = EventLog(1, 7, 3)
    for i in range(4):
        log.stored(name(i), None, 0)
    log.flush()
    assert log.since(0) == Gap()
    assert len(log._batches) == 0


def test_a_snapshot_closes_the_batch_that_it_includes() -> None:
    log = EventLog(1, 7, 100)
    log.stored(name(3), None, 0)
    snapshot = log.snapshot([Stored(name(3), None, 0)])
    assert (snapshot.incarnation, snapshot.number, snapshot.digests) == (7, 1, (3,))
    assert log.since(snapshot.number) == []
    assert len(batches(log, 0)) == 1, "others still get it as a batch"


def test_clearing_supersedes_the_step_so_far() -> None:
    log = EventLog(2, 7, 100)
    log.stored(name(1), None, 0)
    log.cleared()
    log.stored(name(2), None, 1)
    log.flush()
    (batch,) = batches(log, 0)
    assert batch.events == (Cleared(), Stored(name(2), None, 1))
    assert batch.digests == (0, 2)


def test_the_digest_is_that_of_the_first_eight_bytes_whatever_the_order() -> None:
    assert name_digest(BlockName(bytes(range(16)))) == 0x0706050403020100
    forward, backward = EventLog(1, 7, 100), EventLog(1, 7, 100)
    names = [BlockName(bytes([255 - i] * 16)) for i in range(5)]
    for log, order in ((forward, names), (backward, names[::-1])):
        for n in order:
            log.stored(n, None, 0)
    assert forward.digests == backward.digests == (sum(map(name_digest, names)) % 2**64,)
