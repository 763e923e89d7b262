import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from kv_cache.events import Snapshot
from kv_transfer import event_service
from kv_transfer.event_service import ANSWER_S, Subscription
from kv_transfer.faults import Faults
from prefill_worker import reporting
from prefill_worker.node import Node, NodeConfig
from protos.events_pb2 import SubscribeRequest, WorkerEvent
from protos.judging import SILENT_AFTER_S
from router.subscriber import PERIOD_MS
from tests.engine.held import held
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import make_engine

PROMPT = list(range(1, 40))
NUM_SUBSCRIBERS, NUM_TIMES = 4, 3


def test_a_worker_that_is_at_a_long_step_is_not_taken_for_silent() -> None:
    """Between two reports it may ask its engine for events, for a snapshot and for its load."""
    assert PERIOD_MS / 1000 + 3 * ANSWER_S < SILENT_AFTER_S - PERIOD_MS / 2000


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """It does not wait long for its engine."""
    engine = make_engine(str(make_tiny("llama", tmp_path).folder))
    node = Node(NodeConfig(connectors=("inprocess",)), engine, Faults())
    await node.start()
    monkeypatch.setattr(event_service, "ANSWER_S", 0.01)
    monkeypatch.setattr(reporting, "ANSWER_S", 0.01)
    yield node
    await node.stop()


async def compute_prompt(node: Node) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    async for _ in node.engine.submit(GenerationRequest(RequestId("r"), PROMPT, params)):
        pass


async def news(subscription: Subscription) -> list[WorkerEvent]:
    return [event async for event in subscription.news()]


async def until_news(subscription: Subscription) -> list[WorkerEvent]:
    async with asyncio.timeout(30):
        while not (told := await news(subscription)):
            pass
    return told


async def test_what_takes_longer_than_it_is_waited_for_is_asked_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All subscribers get that answer, and go on from it."""
    taken: list[Snapshot] = []
    snapshot = Engine.snapshot

    def counted(engine: Engine) -> Snapshot:
        taken.append(snapshot(engine))
        return taken[-1]

    monkeypatch.setattr(Engine, "snapshot", counted)
    await compute_prompt(node)
    request = SubscribeRequest(cache_events=True)
    subscribers = [Subscription(node.reporter, request) for _ in range(NUM_SUBSCRIBERS)]
    with held(node.engine):
        for _ in range(NUM_TIMES):
            assert await asyncio.gather(*map(news, subscribers)) == [[]] * NUM_SUBSCRIBERS
            await asyncio.gather(*(node.reporter.load() for _ in subscribers))
        assert len(node.engine._commands) == 2, "for the snapshot and for the figures"
    await node.engine.ask(Engine.check_integrity)  # it is there before anybody waits again
    told = [await until_news(subscriber) for subscriber in subscribers]
    assert told == [told[0]] * NUM_SUBSCRIBERS
    assert len(told[0][0].snapshot.stored) == len(taken[0].stored) > 0
    assert len(taken) == 1
    await node.engine.ask(Engine.reset_prefix_cache)
    with held(node.engine):
        for _ in range(NUM_TIMES):
            assert await asyncio.gather(*map(news, subscribers)) == [[]] * NUM_SUBSCRIBERS
        assert len(node.engine._commands) == NUM_SUBSCRIBERS, "each from where it is"
    for subscriber in subscribers:
        (event,) = await until_news(subscriber)
        assert event.batch.number == taken[0].number + 1
    late = Subscription(node.reporter, request)
    assert not (await until_news(late))[0].snapshot.stored, "as it is now"
    assert len(taken) == 2


async def test_figures_that_come_late_are_in_the_next_report(node: Node) -> None:
    await compute_prompt(node)
    with held(node.engine):
        assert (await node.reporter.load()).blocks[0].cached == 0
    await node.engine.ask(Engine.check_integrity)
    with held(node.engine):
        assert (await node.reporter.load()).blocks[0].cached > 0


async def test_an_engine_that_stops_leaves_no_question_open(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    subscriber = Subscription(node.reporter, SubscribeRequest(cache_events=True))
    with held(node.engine):
        assert await news(subscriber) == []
        await node.reporter.load()
        ending = asyncio.ensure_future(node.engine.end())
        await asyncio.sleep(0)
    await ending
    assert await news(subscriber) == []
    assert (await node.reporter.load()).blocks
    del subscriber
    await asyncio.sleep(0)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
