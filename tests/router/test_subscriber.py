"""A feed over a real connection, from workers that tell the truth and from others."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import grpc
import pytest

from kv_transfer.event_messages import encode_batch, encode_snapshot
from kv_transfer.event_service import EventService
from protos.events_pb2 import (
    BlockCounts,
    CacheEvent,
    CacheSnapshot,
    LoadReport,
    StoredBlob,
    SubscribeRequest,
    WorkerEvent,
)
from protos.events_pb2_grpc import WorkerEventsServicer, add_WorkerEventsServicer_to_server
from protos.generation_pb2 import Failure
from protos.rpc import Plane
from protos.secret import Secret
from router import subscriber
from router.ask import key_of
from router.subscriber import WorkerFeed, one_report
from router.worker_index import Outcome, WorkerIndex
from router.workers import CacheShape, Load
from tests.kv_transfer.serving import serving
from tests.kv_transfer.test_event_service import INCARNATION, CacheOnPaper, name
from tests.waiting import until

SHAPE = CacheShape(16, 1)
Context = grpc.aio.ServicerContext[SubscribeRequest, WorkerEvent]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "RETRY_S", 0.005)
    monkeypatch.setattr(subscriber, "PERIOD_MS", 20)
    monkeypatch.setattr("router.patience.FIRST_PAUSE_S", 0.01)


class Scripted(WorkerEventsServicer):
    """Answers each subscription that wants events with the next of some lists, and then says
    nothing more; or breaks off, if there are more lists. Load reports come first."""

    def __init__(self, *scripts: Sequence[WorkerEvent]) -> None:
        self.scripts = list(scripts)
        self.requests: list[SubscribeRequest] = []
        self.breaks = self.ends = False

    async def Subscribe(
        self, request: SubscribeRequest, context: Context
    ) -> AsyncIterator[WorkerEvent]:
        self.requests.append(request)
        yield WorkerEvent(load=LoadReport(num_steps=len(self.requests)))
        if request.cache_events and self.scripts:
            for event in self.scripts.pop(0):
                yield event
            if self.breaks and self.scripts:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut off")
            if self.ends and self.scripts:
                return
        while True:
            await asyncio.sleep(0.01)
            yield WorkerEvent(load=LoadReport(num_steps=len(self.requests)))


@asynccontextmanager
async def followed(
    servicer: WorkerEventsServicer, index: WorkerIndex | None, loads: list[Load] | None = None
) -> AsyncIterator[None]:
    seen = [] if loads is None else loads
    async with serving(lambda s: add_WorkerEventsServicer_to_server(servicer, s)) as channel:
        feed = WorkerFeed("worker", channel, seen.append, index)
        try:
            yield
        finally:
            await feed.close()


def held(index: WorkerIndex) -> set[int]:
    return {number for number in range(100) if index.match([key_of(name(number))], 0.0).num_held}


def batches(cache: CacheOnPaper, *numbers: int) -> list[WorkerEvent]:
    told = cache.log.since(0)
    assert isinstance(told, list)
    return [WorkerEvent(batch=encode_batch(told[number - 1])) for number in numbers]


def snapshot(cache: CacheOnPaper, part_events: int = 2) -> list[WorkerEvent]:
    whole = cache.log.snapshot(list(cache.blobs.values()))
    return [WorkerEvent(snapshot=part) for part in encode_snapshot(whole, part_events)]


@pytest.fixture
def cache() -> CacheOnPaper:
    """Five batches, of a block each."""
    cache = CacheOnPaper()
    for number in range(1, 6):
        cache.store(number)
    return cache


async def test_an_index_is_what_the_cache_is(cache: CacheOnPaper) -> None:
    index, loads = WorkerIndex(SHAPE), list[Load]()
    async with followed(EventService(cache, pace_s=0.001), index, loads):
        await until(lambda: held(index) == {1, 2, 3, 4, 5})
        cache.remove(2, 5)
        cache.store(9)
        await until(lambda: held(index) == {1, 3, 4, 9})
        cache.clear()
        await until(lambda: held(index) == set())
        await until(lambda: len(loads) >= 2)
    assert set(index.counts) == {Outcome.APPLIED}
    assert [load.num_steps for load in loads] == list(range(1, len(loads) + 1))


async def test_whoever_wants_load_reports_alone_gets_them_alone() -> None:
    servicer, loads = Scripted(), list[Load]()
    async with followed(servicer, None, loads):
        await until(lambda: len(loads) >= 3)
    assert [request.cache_events for request in servicer.requests] == [False]


class Miscounting(WorkerEventsServicer):
    """Every other report has a number that cannot be."""

    async def Subscribe(
        self, request: SubscribeRequest, context: Context
    ) -> AsyncIterator[WorkerEvent]:
        for number in count(1):
            yield WorkerEvent(load=LoadReport(num_steps=2 * number, still_s=math.nan))
            yield WorkerEvent(load=LoadReport(num_steps=2 * number + 1))
            await asyncio.sleep(0.01)


async def test_a_report_that_cannot_be_is_not_counted_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And told once, with whose it is."""
    loads: list[Load] = []
    async with followed(Miscounting(), None, loads):
        await until(lambda: len(loads) >= 3)
    assert [load.num_steps for load in loads[:3]] == [3, 5, 7]
    told = "the reports of worker are not believed: load.still_s: nan, must be 0 to 1e+15"
    assert caplog.messages == [told]


async def test_an_index_may_come_later_and_another_one_after_it(cache: CacheOnPaper) -> None:
    """A worker whose cache changes no more is asked for a snapshot all the same."""
    loads = list[Load]()
    first, second = WorkerIndex(SHAPE), WorkerIndex(SHAPE)
    service = EventService(cache, pace_s=0.001)
    async with serving(lambda s: add_WorkerEventsServicer_to_server(service, s)) as channel:
        feed = WorkerFeed("worker", channel, loads.append)
        await until(lambda: bool(loads))
        feed.follow(first)
        await until(lambda: held(first) == {1, 2, 3, 4, 5})
        feed.follow(second)
        await until(lambda: held(second) == {1, 2, 3, 4, 5})
        await feed.close()
    assert set(first.counts) == set(second.counts) == {Outcome.APPLIED}


@pytest.mark.parametrize("how", ["breaks", "ends"])
async def test_after_a_break_it_goes_on_where_it_was(cache: CacheOnPaper, how: str) -> None:
    index = WorkerIndex(SHAPE)
    servicer = Scripted(batches(cache, 1, 2, 3), batches(cache, 4, 5))
    setattr(servicer, how, True)
    async with followed(servicer, index):
        await until(lambda: held(index) == {1, 2, 3, 4, 5})
    first, second = servicer.requests
    assert (first.incarnation, first.after_number) == (0, 0)
    assert (second.incarnation, second.after_number) == (INCARNATION, 3)
    assert set(index.counts) == {Outcome.APPLIED}


async def test_what_was_lost_twice_told_or_swapped_is_asked_for_again(cache: CacheOnPaper) -> None:
    index = WorkerIndex(SHAPE)
    servicer = Scripted(batches(cache, 1, 2, 2, 4, 3), batches(cache, 3, 4, 5))
    async with followed(servicer, index):
        await until(lambda: held(index) == {1, 2, 3, 4, 5})
    assert servicer.requests[1].after_number == 2
    assert index.counts == {Outcome.APPLIED: 5, Outcome.DUPLICATE: 1, Outcome.GAP: 1}


async def test_a_snapshot_that_breaks_off_begins_again(cache: CacheOnPaper) -> None:
    index = WorkerIndex(SHAPE)
    parts = snapshot(cache)
    servicer = Scripted(parts[:2], parts)
    servicer.breaks = True
    async with followed(servicer, index):
        await until(lambda: held(index) == {1, 2, 3, 4, 5})
    assert [request.incarnation for request in servicer.requests] == [0, 0]


def broken(cache: CacheOnPaper, what: str) -> WorkerEvent:
    event = batches(cache, 3)[0]
    match what:
        case "digest":
            event.batch.digests[0] ^= 1 << 40
        case "no digests":
            del event.batch.digests[:]
        case "no event":
            event.batch.events.append(CacheEvent())
        case "short name":
            event.batch.events.append(CacheEvent(stored=StoredBlob(name=b"short")))
        case "tier":
            event.batch.events[0].stored.tier = 17
        case "group":
            event.batch.events[0].stored.group = 2**32 - 1
        case "number":
            event.batch.number = 2**64 - 1
        case "incarnation":
            event.batch.incarnation ^= 1
        case "part":
            event = WorkerEvent(snapshot=CacheSnapshot(incarnation=INCARNATION, number=2**64 - 1))
        case "kind":
            event = WorkerEvent()
    return event


@pytest.mark.parametrize(
    "what",
    [
        "digest",
        "no digests",
        "no event",
        "short name",
        "tier",
        "group",
        "number",
        "incarnation",
        "part",
        "kind",
    ],
)
async def test_whatever_a_worker_says_it_is_asked_again(cache: CacheOnPaper, what: str) -> None:
    """What it told before stays, but where it seems to be another process."""
    index, loads = WorkerIndex(SHAPE), list[Load]()
    servicer = Scripted([*batches(cache, 1, 2), broken(cache, what)], snapshot(cache))
    async with followed(servicer, index, loads):
        await until(lambda: held(index) == {1, 2, 3, 4, 5})
        await until(lambda: len(loads) > len(servicer.requests))
    first, second = servicer.requests
    replayed = what == "number"
    assert (second.incarnation, second.after_number) == ((INCARNATION, 2) if replayed else (0, 0))
    wrong = [outcome for outcome in index.counts if outcome.needs_snapshot]
    expected = {
        "digest": Outcome.DIGEST,
        "number": Outcome.GAP,
        "incarnation": Outcome.INCARNATION,
    }
    assert wrong == [expected.get(what, Outcome.BAD_EVENTS)]
    assert index.counts[wrong[0]] == 1


async def test_a_worker_that_lies_all_the_time_is_still_heard(cache: CacheOnPaper) -> None:
    """Its load reports go on; its events are asked for less and less often."""
    index, loads = WorkerIndex(SHAPE), list[Load]()
    truth = snapshot(cache)
    cache.store(6)
    lie = batches(cache, 6)
    lie[0].batch.digests[0] ^= 1
    servicer = Scripted(*[[*truth, *lie]] * 5, snapshot(cache))
    async with followed(servicer, index, loads):
        await until(lambda: not servicer.scripts)
        await until(lambda: held(index) == {1, 2, 3, 4, 5, 6})
    assert index.counts[Outcome.DIGEST] == 5
    asked = enumerate(servicer.requests, start=1)
    alone = {number for number, request in asked if not request.cache_events}
    assert alone, "between them there were streams of load reports"
    assert alone <= {load.num_steps for load in loads}


async def test_a_worker_holds_no_more_than_it_has_room_for(cache: CacheOnPaper) -> None:
    class Small(CacheOnPaper):
        async def load(self) -> LoadReport:
            return LoadReport(blocks=[BlockCounts(total=3)])

    small, index = Small(), WorkerIndex(SHAPE)
    small.store(1, 2, 3)
    async with followed(EventService(small, pace_s=0.001), index):
        await until(lambda: held(index) == {1, 2, 3})
        assert index.capacity == 3
        small.store(4, 5)
        await until(lambda: index.counts[Outcome.OVERFULL] >= 2)
        assert len(index) == 0
        small.remove(1, 2)
        await until(lambda: held(index) == {3, 4, 5})


async def test_another_process_at_the_address_is_another_cache(cache: CacheOnPaper) -> None:
    index = WorkerIndex(SHAPE)
    reborn = CacheOnPaper()
    reborn.incarnation = reborn.log.incarnation = INCARNATION + 1
    reborn.store(8)
    servicer = Scripted(batches(cache, 1, 2), snapshot(reborn))
    servicer.breaks = True
    async with followed(servicer, index):
        await until(lambda: held(index) == {8})
    assert index.resume() == (INCARNATION + 1, 1)


async def test_what_cannot_be_taken_once_does_not_end_the_feed() -> None:
    heard: list[Load] = []

    def take(load: Load) -> None:
        heard.append(load)
        if len(heard) == 2:
            raise ZeroDivisionError

    worker = Scripted()
    async with serving(lambda s: add_WorkerEventsServicer_to_server(worker, s)) as channel:
        feed = WorkerFeed("worker", channel, take)
        await until(lambda: len(heard) > 4)
        await feed.close()
    assert len(worker.requests) == 2


async def test_one_report_is_asked_for_and_no_events() -> None:
    servicer = Scripted()
    async with serving(lambda s: add_WorkerEventsServicer_to_server(servicer, s)) as channel:
        report = await one_report(channel, timeout_s=5)
    assert isinstance(report, LoadReport)
    assert report.num_steps == 1
    assert not servicer.requests[0].cache_events


async def test_who_gets_no_report_is_told_why() -> None:
    guarded = Plane(Secret(b"x" * 32)).server()
    add_WorkerEventsServicer_to_server(Scripted(), guarded)
    address = Plane().listen(guarded, "127.0.0.1:0")
    await guarded.start()
    async with Plane().channel(address) as channel:
        refused = await one_report(channel, timeout_s=5)
        await guarded.stop(None)
        gone = await one_report(channel, timeout_s=5)
    assert isinstance(refused, Failure)
    assert refused.message == "the cluster secret is missing or wrong"
    assert isinstance(gone, Failure)
    assert gone.kind == Failure.KIND_UNAVAILABLE


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"no message", "what came is no load report"),
        (WorkerEvent(load=LoadReport(still_s=math.nan)).SerializeToString(), "load.still_s"),
    ],
)
async def test_who_reports_nonsense_is_told_of(said: bytes, words: str) -> None:
    """By whoever asked for it, and goes on to ask others."""

    async def say(request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield said

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(say)
    service = "kvrelay.v1.WorkerEvents"
    handler = grpc.method_handlers_generic_handler(service, {"Subscribe": method})
    async with serving(lambda s: s.add_generic_rpc_handlers((handler,))) as channel:
        failure = await one_report(channel, timeout_s=5)
    assert isinstance(failure, Failure)
    assert failure.kind == Failure.KIND_INCOMPATIBLE
    assert words in failure.message


async def test_who_took_a_workers_address_does_not_report_for_it() -> None:
    """A worker that is gone would look alive by it, and be given requests."""
    servicer = Scripted()
    seen: list[Load] = []
    others: list[Load] = []
    async with serving(lambda s: add_WorkerEventsServicer_to_server(servicer, s)) as channel:
        gone = WorkerFeed("worker", channel, seen.append, incarnation=INCARNATION)
        there = WorkerFeed("worker", channel, others.append)
        try:
            await until(lambda: len(others) > 3 and len(servicer.requests) == 2)
        finally:
            await gone.close()
            await there.close()
    assert seen == []
