"""A subscriber's index, built from the stream alone, against what the cache stores."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

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
from kv_cache.names import NAME_BYTES, BlockName
from kv_transfer import event_service
from kv_transfer.errors import TransferError
from kv_transfer.event_messages import (
    MAX_BATCH_EVENTS,
    PART_EVENTS,
    decode_batch,
    decode_stored,
    encode_batch,
)
from kv_transfer.event_service import EventService
from protos.events_pb2 import (
    CacheBatch,
    CacheEvent,
    LoadReport,
    RemovedBlob,
    StoredBlob,
    SubscribeRequest,
    WorkerEvent,
)
from protos.events_pb2_grpc import WorkerEventsStub, add_WorkerEventsServicer_to_server
from protos.failures import failure_of
from protos.generation_pb2 import Failure
from protos.limits import MAX_MESSAGE_BYTES, PROTOCOL
from tests.kv_transfer.serving import serving

INCARNATION = 77


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(NAME_BYTES, "little"))


class CacheOnPaper:
    """An event log and what it speaks of, without blocks."""

    def __init__(self, max_events: int = 1000) -> None:
        self.incarnation = INCARNATION
        self.log = EventLog(1, INCARNATION, max_events)
        self.blobs: dict[BlockName, Stored] = {}
        self.num_loads = self.num_looks = 0
        self.answers = asyncio.Event()
        self.answers.set()

    def store(self, *numbers: int) -> None:
        for number in numbers:
            parent = name(number - 1) if number % 2 else None
            self.blobs[name(number)] = Stored(name(number), parent, 0)
            self.log.stored(name(number), parent, 0)
        self.log.flush()

    def remove(self, *numbers: int) -> None:
        for number in numbers:
            del self.blobs[name(number)]
            self.log.removed(name(number), 0)
        self.log.flush()

    def clear(self) -> None:
        self.blobs.clear()
        self.log.cleared()
        self.log.flush()

    async def events_since(self, number: int) -> Sequence[EventBatch] | Gap:
        self.num_looks += 1
        await self.answers.wait()
        return self.log.since(number)

    async def newer(self, number: int) -> None:
        while self.log.latest == number:
            await asyncio.sleep(0.001)

    async def snapshot(self) -> Snapshot | None:
        await self.answers.wait()
        return self.log.snapshot(self.blobs.values())

    async def load(self) -> LoadReport:
        self.num_loads += 1
        return LoadReport(incarnation=INCARNATION, num_steps=self.num_loads)


class Index:
    """A router's view; checks numbers and digests as it goes."""

    def __init__(self) -> None:
        self.stored: set[BlockName] = set()
        self.number = 0
        self.num_snapshots = 0
        self.loads: list[int] = []
        self.sizes: list[int] = []
        self._part: list[BlockName] = []

    def apply(self, event: WorkerEvent) -> None:
        self.sizes.append(event.ByteSize())
        match event.WhichOneof("kind"):
            case "load":
                self.loads.append(event.load.num_steps)
            case "snapshot":
                self._part += [decode_stored(blob).name for blob in event.snapshot.stored]
                if event.snapshot.complete:
                    self.num_snapshots += 1
                    self.stored, self._part = set(self._part), []
                    self._check(event.snapshot.number, event.snapshot.digests)
            case "batch":
                batch = decode_batch(event.batch)
                assert batch.number == self.number + 1
                for change in batch.events:
                    match change:
                        case Stored():
                            self.stored.add(change.name)
                        case Removed():
                            self.stored.remove(change.name)
                        case Cleared():
                            self.stored.clear()
                self._check(batch.number, batch.digests)

    def _check(self, number: int, digests: Sequence[int]) -> None:
        self.number = number
        assert list(digests) == [sum(map(name_digest, self.stored)) % DIGEST_MODULUS]


def ask(index: Index | None = None, load_period_ms: int = 0) -> SubscribeRequest:
    return SubscribeRequest(
        protocol=PROTOCOL,
        incarnation=INCARNATION if index else 0,
        after_number=index.number if index else 0,
        load_period_ms=load_period_ms,
        cache_events=True,
    )


@pytest.fixture
async def cache() -> CacheOnPaper:
    return CacheOnPaper()


@pytest.fixture
async def stub(cache: CacheOnPaper) -> AsyncIterator[WorkerEventsStub]:
    service = EventService(cache, pace_s=0.001)
    async with serving(lambda s: add_WorkerEventsServicer_to_server(service, s)) as channel:
        yield WorkerEventsStub(channel)


async def follow(stub: WorkerEventsStub, index: Index, cache: CacheOnPaper) -> None:
    """Until the index knows all that the cache did."""
    call = stub.Subscribe(ask(index if index.number else None), timeout=30)
    while index.number < cache.log.latest:
        event = await call.read()  # type: ignore[attr-defined]
        index.apply(event)
    call.cancel()
    assert index.stored == cache.blobs.keys()


async def test_an_index_follows(stub: WorkerEventsStub, cache: CacheOnPaper) -> None:
    cache.store(1, 2, 3)
    index = Index()
    await follow(stub, index, cache)
    cache.store(4)
    cache.remove(2, 3)
    await follow(stub, index, cache)
    cache.clear()
    cache.store(9)
    await follow(stub, index, cache)
    assert index.num_snapshots == 1, "who comes back gets the batches it missed"


async def test_who_was_away_too_long_gets_a_snapshot(
    stub: WorkerEventsStub, cache: CacheOnPaper
) -> None:
    index = Index()
    cache.store(1)
    await follow(stub, index, cache)
    for number in range(2, 1500):
        cache.store(number)
    await follow(stub, index, cache)
    assert index.num_snapshots == 2
    index.number = cache.log.latest + 5  # of the future: an index that is wrong about us
    call = stub.Subscribe(ask(index), timeout=30)
    index.apply(await call.read())  # type: ignore[attr-defined]
    assert index.num_snapshots == 3


async def test_another_incarnation_starts_anew(stub: WorkerEventsStub, cache: CacheOnPaper) -> None:
    cache.store(1)
    index = Index()
    request = ask(index)
    request.incarnation = INCARNATION + 1
    call = stub.Subscribe(request, timeout=30)
    index.apply(await call.read())  # type: ignore[attr-defined]
    assert index.num_snapshots == 1
    assert index.stored == cache.blobs.keys()


async def test_large_ones_are_split(stub: WorkerEventsStub, cache: CacheOnPaper) -> None:
    cache.store(*range(MAX_BATCH_EVENTS + 1))
    index = Index()
    await follow(stub, index, cache)
    assert len(index.sizes) == MAX_BATCH_EVENTS // PART_EVENTS + 1
    cache.store(*range(MAX_BATCH_EVENTS + 1, 2 * MAX_BATCH_EVENTS + 3))
    await follow(stub, index, cache)
    assert index.num_snapshots == 2, "instead of a batch that no message holds"
    assert max(index.sizes) < MAX_MESSAGE_BYTES


async def test_a_slow_subscriber_costs_nothing_and_comes_to_the_same(
    stub: WorkerEventsStub, cache: CacheOnPaper
) -> None:
    """It reads nothing while far more happens than flow control lets through."""
    call = stub.Subscribe(ask(), timeout=60)
    index = Index()
    index.apply(await call.read())  # type: ignore[attr-defined]
    for start in range(0, 100_000, 500):
        cache.store(*range(start, start + 500))
        await asyncio.sleep(0)
    assert len(cache.log.since(cache.log.latest - 1)) == 1  # type: ignore[arg-type]
    while index.number < cache.log.latest:
        index.apply(await call.read())  # type: ignore[attr-defined]
    assert index.stored == cache.blobs.keys()
    assert index.num_snapshots >= 2


async def test_nobody_looks_for_events_while_there_are_none(
    stub: WorkerEventsStub, cache: CacheOnPaper
) -> None:
    call = stub.Subscribe(ask(load_period_ms=50), timeout=30)
    index = Index()
    while len(index.loads) < 4:
        index.apply(await call.read())  # type: ignore[attr-defined]
    assert cache.num_looks <= cache.num_loads
    cache.store(1)
    while not index.stored:
        index.apply(await call.read())  # type: ignore[attr-defined]


async def test_loads_come_at_their_period_while_the_engine_is_stuck(
    stub: WorkerEventsStub, cache: CacheOnPaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_service, "ANSWER_S", 0.01)
    cache.answers.clear()
    started = asyncio.get_running_loop().time()
    call = stub.Subscribe(ask(load_period_ms=50), timeout=30)
    index = Index()
    while len(index.loads) < 4:
        index.apply(await call.read())  # type: ignore[attr-defined]
    assert index.loads == [1, 2, 3, 4]
    assert asyncio.get_running_loop().time() - started >= 0.149
    cache.answers.set()
    cache.store(1)
    while not index.stored:
        index.apply(await call.read())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("field", "kind", "request_"),
    [
        ("protocol", Failure.KIND_INCOMPATIBLE, SubscribeRequest(cache_events=True)),
        ("cache_events", Failure.KIND_INVALID, SubscribeRequest(protocol=PROTOCOL)),
        (
            "load_period_ms",
            Failure.KIND_INVALID,
            SubscribeRequest(protocol=PROTOCOL, load_period_ms=1),
        ),
    ],
)
async def test_refusals(
    stub: WorkerEventsStub,
    field: str,
    kind: Failure.Kind.ValueType,
    request_: SubscribeRequest,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Subscribe(request_, timeout=10).read()  # type: ignore[attr-defined]
    failure = failure_of(caught.value)
    assert (failure.kind, failure.field) == (kind, field)


def test_batches_come_back_as_they_were() -> None:
    events = (
        Cleared(),
        Stored(name(1), None, 2),
        Stored(name(2), name(1), 0),
        Removed(name(1), 2),
        Removed(name(2), 0),
    )
    batch = EventBatch(2**63 - 1, 9, events, (5, 2**64 - 1, 0))
    assert decode_batch(CacheBatch.FromString(encode_batch(batch).SerializeToString())) == batch


@pytest.mark.parametrize(
    "event",
    [
        CacheEvent(),
        CacheEvent(stored=StoredBlob(name=b"short")),
        CacheEvent(stored=StoredBlob(name=name(1), parent=b"x" * 17)),
        CacheEvent(removed=RemovedBlob()),
        CacheEvent(stored=StoredBlob(name=name(1), tier=1)),
        CacheEvent(removed=RemovedBlob(name=name(1), tier=2**32 - 1)),
    ],
)
def test_what_is_no_event_is_refused(event: CacheEvent) -> None:
    with pytest.raises(TransferError):
        decode_batch(CacheBatch(events=[event]))
