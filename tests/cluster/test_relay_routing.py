"""Which workers a relay asks, when, and what it says where there are none."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.published import metadata_of
from cluster.relay import RelayConfig
from cluster.replicas.ingress_replica import IngressReplica
from cluster.routing_view import routing_view
from engine.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    StepError,
    UnavailableError,
)
from engine.request import (
    ChoiceDelta,
    PromptReport,
    RequestId,
)
from engine.sampling import SamplingParams
from kv_cache.events import DIGEST_MODULUS, EventBatch, Stored, name_digest
from kv_cache.names import cache_identity, name_blocks, root_name
from protos.events_pb2 import BlockCounts, LoadReport
from protos.worker_pb2 import WorkerDescription
from router.ask import Ask, Placement
from router.config import RouterConfig
from router.workers import Leg, Worker
from tests.cluster.fake_fleet import (
    END,
    FINGERPRINT,
    RELEASE,
    FakeWorker,
    Fleet,
    MakeFleet,
    next_tokens,
    next_update,
    request,
)
from tests.decode_worker.fakes import DESCRIPTION
from tests.waiting import until


async def test_nobody_there_is_said_after_a_while(make_fleet: MakeFleet) -> None:
    relay = make_fleet(RelayConfig(max_new_alone_s=0.6)).relay
    stream = relay.submit(request())
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="no decode worker"):
        await next_update(stream)
    assert 0.6 <= time.monotonic() - began < 10.0 < relay.config.max_alone_s
    with pytest.raises(UnavailableError):
        relay.check_health()
    stream.close()


@pytest.mark.parametrize("reads", ["before it died", "afterwards"])
async def test_who_waited_for_a_worker_that_died_waits_for_the_next(
    fleet: Fleet, reads: str
) -> None:
    fleet.relay.config = replace(fleet.relay.config, max_new_alone_s=0.6, max_alone_s=60.0)
    worker = FakeWorker()
    room = [BlockCounts(total=1000, free=1000)]
    worker.loads.report = LoadReport(max_sequences=1, block_size=16, blocks=room)
    await fleet.add(worker=worker)
    first, second = fleet.relay.submit(request("a")), fleet.relay.submit(request("b"))
    await worker.stream()
    if reads == "afterwards":
        fleet.remove(worker)
    waiting = asyncio.create_task(next_tokens(second))
    await asyncio.sleep(0)  # it waits
    if reads != "afterwards":
        fleet.remove(worker)
    for name in ("c", "d"):  # the relay looks twice a second who is there
        late = fleet.relay.submit(request(name))
        with pytest.raises(UnavailableError, match="no decode worker"):
            await next_update(late)
        late.close()
    assert not waiting.done(), "it waited no longer than who came when nobody was there"
    heir = await fleet.add()
    (await heir.stream()).push(ChoiceDelta(0, [7], finish_reason=END))
    assert await waiting == [7]
    for stream in (first, second):
        stream.close()


async def test_many_that_wait_look_around_together(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself twice a second, ten thousand took most of an ingress's core."""
    for module in ("cluster.relay", "cluster.relay_stream"):
        monkeypatch.setattr(f"{module}.CHECK_S", 0.02)
    fleet = make_fleet(RelayConfig(max_alone_s=0.3))
    relay = fleet.relay
    worker = FakeWorker()
    room = [BlockCounts(total=1000, free=1000)]
    worker.loads.report = LoadReport(max_sequences=1, num_running=1, block_size=16, blocks=room)
    await fleet.add(worker=worker)
    looks = 0
    missing = relay.pools.missing

    def counted(without: Collection[Worker] = (), may_stay: bool = True) -> Leg | None:
        nonlocal looks
        looks += 1
        return missing(without, may_stay)

    monkeypatch.setattr(relay.pools, "missing", counted)
    streams = [relay.submit(request(str(number))) for number in range(50)]
    waiting = [asyncio.create_task(next_update(stream)) for stream in streams]
    ticks = 0
    dispatch = relay.router.dispatch

    def ticked(now: float) -> list[tuple[Ask, Placement]]:
        nonlocal ticks
        ticks += 1
        return dispatch(now)

    monkeypatch.setattr(relay.router, "dispatch", ticked)
    await until(lambda: ticks >= 6)
    assert not any(one.done() for one in waiting)
    assert looks < 2 * len(streams)
    fleet.remove(worker)
    for one in waiting:
        with pytest.raises(UnavailableError, match="no decode worker"):
            await one
    for stream in streams:
        stream.close()


async def test_prompts_go_to_the_prefill_worker_with_the_shortest_queue(fleet: Fleet) -> None:
    decode = await fleet.add()
    busy, idle = FakeWorker(), FakeWorker()
    busy.loads.report.num_queued_tokens = 5000
    await fleet.add(Leg.PREFILL, busy)
    await fleet.add(Leg.PREFILL, idle)
    stream = fleet.relay.submit(request())
    route = (await decode.stream()).submitted.route
    assert [worker.address for worker in route.prefill_workers] == [idle.address, busy.address]
    stream.close()


async def test_a_prompt_goes_to_who_has_its_beginning_and_the_choice_can_be_explained(
    fleet: Fleet,
) -> None:
    decode = await fleet.add()
    cold, warm = FakeWorker(), FakeWorker()
    for worker in (cold, warm):
        worker.loads.report.step_times.prompt_token_s = 0.001
        await fleet.add(Leg.PREFILL, worker)
    decode.loads.report.step_times.prompt_token_s = 0.1
    await fleet.hear(decode)
    prompt = list(range(100))
    cache = fleet.relay.pools.cache
    assert cache is not None
    root = root_name(cache_identity(FINGERPRINT, "float32", 16), "salt")
    names = name_blocks(root, prompt, 16)
    parents = (None, *names)
    stored = tuple(Stored(*pair, 0) for pair in zip(names, parents, strict=False))
    digest = sum(map(name_digest, names)) % DIGEST_MODULUS
    index = fleet.relay.router.index.of(warm.worker)
    assert not index.apply(EventBatch(5, 1, stored, (digest,))).needs_snapshot
    asked = replace(request("warm"), prompt_token_ids=prompt, cache_salt="salt", tenant="one")
    stream = fleet.relay.submit(asked)
    route = (await decode.stream()).submitted.route
    assert route.prefill_workers[0].address == warm.address
    view = routing_view(fleet.relay.router, time.monotonic(), "one")
    (decision,) = view["decisions"]
    assert (decision["request_id"], decision["tenant"]) == ("warm", "one")
    assert decision["considered"][0]["prefill"] == warm.address
    assert decision["considered"][0]["num_cached"] == 96
    by_address = {worker["address"]: worker for worker in view["workers"]}
    assert set(view["backlog"].values()) == {0.0}
    assert by_address[warm.address]["index_blocks"] > by_address[cold.address]["index_blocks"]
    json.dumps(view)
    for_others = json.dumps(routing_view(fleet.relay.router, time.monotonic(), "two"))
    assert "num_cached" in for_others, "why it went there is told"
    assert '"one"' not in for_others
    assert "warm" not in for_others
    stream.close()
    other = fleet.relay.submit(replace(asked, request_id=RequestId("cold"), cache_salt="other"))
    await decode.stream(1)
    assert fleet.relay.router.decisions[-1].placement.considered[0].num_cached == 0
    other.close()


async def test_one_look_serves_all_that_ends_in_a_turn_of_the_loop(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, router = await fleet.add(), fleet.relay.router
    streams = [fleet.relay.submit(request(f"r{number}")) for number in range(5)]
    await decode.stream(4)
    looks: list[float] = []

    def look(now: float) -> list[tuple[Ask, Placement]]:
        looks.append(now)
        return []

    monkeypatch.setattr(router, "dispatch", look)
    for stream in streams:
        stream.close()
    assert not looks
    await asyncio.sleep(0)
    assert len(looks) == 1


async def test_who_would_be_late_is_told_when_to_come_again(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(router=RouterConfig(ttft_objective_s=1.0))
    relay = fleet.relay
    decode = FakeWorker()
    decode.loads.report.step_times.prompt_token_s = 0.001
    decode.loads.report.num_queued_tokens = 5000
    await fleet.add(Leg.DECODE, decode)
    stream = relay.submit(request())
    with pytest.raises(QueueFullError, match="later than the 1.0 s") as refused:
        await next_update(stream)
    assert 1.0 < refused.value.retry_after_s < 5.0
    stream.close()
    assert relay.router.num_under_way == 0


async def test_who_waits_at_the_router_goes_when_there_is_time(fleet: Fleet) -> None:
    """A long queue on the only worker holds it back; its own deadline ends it."""
    worker = FakeWorker()
    worker.loads.report.step_times.prompt_token_s = 0.001
    worker.loads.report.max_step_tokens = 1000
    worker.loads.report.num_queued_tokens = 5000
    await fleet.add(worker=worker)
    late = fleet.relay.submit(replace(request("late"), timeout_s=0.2))
    patient = fleet.relay.submit(request("patient"))
    with pytest.raises(DeadlineError):
        await next_update(late)
    assert not worker.answerer.streams
    worker.loads.report.num_queued_tokens = 0
    answer = await worker.stream()
    assert answer.submitted.request.request_id.endswith("patient")
    for stream in (late, patient):
        stream.close()
    assert fleet.relay.router.num_waiting == 0


async def test_who_is_to_go_first_does(fleet: Fleet) -> None:
    worker = FakeWorker()
    room = [BlockCounts(total=1000, free=1000)]
    worker.loads.report = LoadReport(max_sequences=1, num_running=1, block_size=16, blocks=room)
    await fleet.add(worker=worker)
    usual = fleet.relay.submit(request("usual"))
    first = fleet.relay.submit(replace(request("first"), priority=-1))
    worker.loads.report.num_running = 0
    answer = await worker.stream()
    assert answer.submitted.request.request_id.endswith("first")
    for stream in (usual, first):
        stream.close()


async def test_who_waited_as_long_as_anybody_may_is_told_to_come_again(
    make_fleet: MakeFleet,
) -> None:
    """Its own time is not over: to say so would be untrue, and clients would not try again."""
    fleet = make_fleet(router=RouterConfig(max_wait_s=0.2))
    worker = FakeWorker()
    worker.loads.report.step_times.prompt_token_s = 0.001
    worker.loads.report.max_step_tokens = 1000
    worker.loads.report.num_queued_tokens = 5000
    await fleet.add(worker=worker)
    stream = fleet.relay.submit(request())
    with pytest.raises(QueueFullError, match="^no worker had time for it in 0.2 s$"):
        await next_update(stream)
    stream.close()


async def test_an_answer_that_has_come_leaves_room_for_others_before_it_is_read(
    fleet: Fleet,
) -> None:
    """One client may wait for more answers than run at once, and read none before it has some."""
    worker = FakeWorker()
    room = [BlockCounts(total=1000, free=1000)]
    worker.loads.report = LoadReport(max_sequences=2, block_size=16, blocks=room)
    await fleet.add(worker=worker)
    streams = [fleet.relay.submit(request(str(number))) for number in range(5)]
    for number in range(5):
        answer = await worker.stream(number)
        answer.push(ChoiceDelta(0, [number], finish_reason=END), prompt=PromptReport(0))
        if number < 2:
            assert len(worker.answerer.streams) <= number + 2
    assert [await next_tokens(stream) for stream in streams] == [[n] for n in range(5)]
    assert fleet.relay.router.num_under_way == 0
    for stream in streams:
        stream.close()


async def test_an_answer_whose_stop_was_found_leaves_room_before_it_is_closed(fleet: Fleet) -> None:
    worker = FakeWorker()
    room = [BlockCounts(total=1000, free=1000)]
    worker.loads.report = LoadReport(max_sequences=1, block_size=16, blocks=room)
    await fleet.add(worker=worker)
    first, second = fleet.relay.submit(request("a")), fleet.relay.submit(request("b"))
    (await worker.stream()).push(ChoiceDelta(0, [1]))
    assert await next_tokens(first) == [1]
    first.stop_choice(0)
    (await worker.stream(1)).push(ChoiceDelta(0, [2], finish_reason=END))
    assert await next_tokens(second) == [2]
    for stream in (first, second):
        stream.close()


async def test_an_answer_that_has_failed_leaves_room_before_that_is_read(fleet: Fleet) -> None:
    """Its client may read slowly, or not at all."""
    worker = FakeWorker()
    room = [BlockCounts(total=1000, free=1000)]
    worker.loads.report = LoadReport(max_sequences=1, block_size=16, blocks=room)
    await fleet.add(worker=worker)
    slow, next_one = fleet.relay.submit(request("slow")), fleet.relay.submit(request("next"))
    answer = await worker.stream()
    answer.push(ChoiceDelta(0, [1]))
    answer.fail(StepError("no more memory"))
    (await worker.stream(1)).push(ChoiceDelta(0, [2], finish_reason=END))
    assert await next_tokens(next_one) == [2]
    assert await next_tokens(slow) == [1]
    with pytest.raises(StepError):
        await next_tokens(slow)
    assert fleet.relay.router.num_under_way == 0
    for stream in (slow, next_one):
        stream.close()


async def test_with_never_a_prompt_waits_for_a_prefill_worker_to_come(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(RelayConfig(max_new_alone_s=0.05), RouterConfig(may_stay=False))
    relay = fleet.relay
    decode = await fleet.add()
    stream = relay.submit(request())
    reading = asyncio.create_task(next_tokens(stream))
    with pytest.raises(UnavailableError, match="no prefill worker"):
        relay.check_health()
    prefill = await fleet.add(Leg.PREFILL)
    relay.check_health()
    answer = await decode.stream()
    assert [one.address for one in answer.submitted.route.prefill_workers] == [prefill.address]
    answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    stream.close()


async def test_an_ingress_whose_weights_nobody_has_any_more_is_to_be_replaced(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """But not while one that has them may come back, nor under what it still answers."""
    pools = fleet.relay.pools
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await first.stream()
    other = FakeWorker(description=WorkerDescription.FromString(DESCRIPTION.SerializeToString()))
    other.description.format.fingerprint = "hub:def"
    await fleet.start(other)
    fleet.name_again(other)
    await until(lambda: pools.session_of(other.worker).is_open)  # type: ignore[union-attr]
    assert f"decode {other.address} has other weights" in caplog.text
    assert pools.usable(Leg.DECODE) == [first.worker]
    assert pools.problem() is None
    fleet.remove(first)
    assert pools.problem() is None
    answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await next_tokens(stream) == [1]
    stream.close()
    assert pools.problem() == f"{other.address}: other weights than it began with"
    replica: Any = SimpleNamespace(_pools=pools)
    with pytest.raises(UnavailableError, match="other weights"):
        await IngressReplica.check_health(replica)
    fleet.name_again(first)
    assert pools.problem() is None
    await IngressReplica.check_health(replica)


async def test_a_long_prompt_is_named_off_the_loop(fleet: Fleet) -> None:
    worker = await fleet.add()
    prompt = [1] * 5000
    stream = fleet.relay.submit(replace(request(), prompt_token_ids=prompt))
    assert not worker.answerer.streams
    await worker.stream()
    stream.close()


async def test_who_leaves_while_its_prompt_is_named_is_gone(fleet: Fleet) -> None:
    """Nobody would read the answer, and the router count it for ever."""
    worker = await fleet.add()
    long = replace(request("gone"), prompt_token_ids=[1] * 5000)
    fleet.relay.submit(long).close()
    stays = fleet.relay.submit(replace(long, request_id=RequestId("stays")))
    answer = await worker.stream()
    assert answer.submitted.request.request_id.endswith("stays")
    stays.close()
    assert fleet.relay.router.stats.num_submitted == 1
    assert fleet.relay.router.num_under_way == 0


async def test_a_prompt_whose_blocks_get_no_names_fails(fleet: Fleet) -> None:
    """No token has such a number."""
    worker = await fleet.add()
    stream = fleet.relay.submit(replace(request(), prompt_token_ids=[-1] * 5000))
    with pytest.raises(EngineError, match="could not be routed"):
        await next_update(stream)
    stream.close()
    assert fleet.relay.num_open == 0
    other = fleet.relay.submit(replace(request("b"), prompt_token_ids=[1] * 5000))
    await worker.stream()
    other.close()


async def test_a_prefill_worker_that_was_there_first_is_used(fleet: Fleet) -> None:
    """Whose weights are served is known with the first decode worker."""
    prefill = FakeWorker()
    await fleet.start(prefill)
    fleet.name_again(prefill, Leg.PREFILL)
    await fleet.add()
    await until(lambda: fleet.relay.pools.usable(Leg.PREFILL) == [prefill.worker])


async def test_workers_of_another_release_are_not_used(fleet: Fleet) -> None:
    pools, worker, ours = fleet.relay.pools, FakeWorker(), FakeWorker()
    for one in (worker, ours):
        await fleet.start(one)
    named = {"x": metadata_of(worker.worker, "another"), "y": metadata_of(ours.worker, RELEASE)}
    pools.update(Leg.DECODE, named)
    await pools.first_description()
    await until(lambda: ours.worker in pools.usable(Leg.DECODE))
    assert [one.worker for one in pools.router.accounts(Leg.DECODE)] == [ours.worker]
    assert (worker.sessions.num_sessions, ours.sessions.num_sessions) == (0, 1)


async def test_an_answer_is_expected_to_be_as_long_as_others_were_and_as_it_may(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, router = await fleet.add(), fleet.relay.router
    expected: list[int] = []
    submit = router.submit

    def noted(ask: Ask, now: float) -> None:
        expected.append(ask.num_new)
        submit(ask, now)

    monkeypatch.setattr(router, "submit", noted)
    for number, (max_tokens, num_tokens) in enumerate([(50, 40), (None, 1), (None, 1)]):
        params = SamplingParams(max_tokens=max_tokens)
        stream = fleet.relay.submit(replace(request(str(number)), params=params))
        answer = await worker.stream(number)
        for _ in range(num_tokens - 1):
            answer.push(ChoiceDelta(0, [1]))
            assert await next_tokens(stream) == [1]
        answer.push(ChoiceDelta(0, [1], finish_reason=END))
        assert await next_tokens(stream) == [1]
        stream.close()
    # a fiftieth of the way from what was expected to what came
    assert expected == [50, round(128 - 88 / 50), round(126.24 - 125.24 / 50)]


async def test_who_leaves_while_it_waits_waits_no_more(fleet: Fleet) -> None:
    worker = FakeWorker()
    room = [BlockCounts(total=1000, free=1000)]
    worker.loads.report = LoadReport(max_sequences=1, block_size=16, blocks=room)
    await fleet.add(worker=worker)
    streams = [fleet.relay.submit(request(name)) for name in "abc"]
    answer = await worker.stream()
    assert fleet.relay.router.num_waiting == 2
    streams[1].close()
    assert fleet.relay.router.num_waiting == 1
    answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert (await worker.stream(1)).submitted.request.request_id.endswith("/c")
    for stream in streams:
        stream.close()
