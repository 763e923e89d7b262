"""What becomes of an answer whose worker dies, leaves, is full or gets nowhere."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.relay import RelayConfig
from cluster.relay_stream import RelayStream
from cluster.session import SessionBackend
from engine.errors import (
    EngineDiedError,
    QueueFullError,
    RequestError,
    StepError,
    UnavailableError,
)
from engine.request import (
    ChoiceDelta,
    ChoiceSoFar,
    PromptReport,
)
from protos.events_pb2 import BlockCounts, LoadReport
from protos.generation_pb2 import Failure
from router.config import RouterConfig
from router.workers import Leg
from tests.cluster.fake_fleet import (
    END,
    FakeWorker,
    Fleet,
    MakeFleet,
    next_tokens,
    next_update,
    request,
)
from tests.waiting import until

DOOMED = "^2 workers died or got stuck under request poison$"


def is_answering(worker: FakeWorker) -> bool:
    return any(not stream.closed.is_set() for stream in worker.answerer.streams)


async def taken(workers: list[FakeWorker]) -> FakeWorker:
    """The one that answers, and is no longer of them."""
    await until(lambda: any(map(is_answering, workers)))
    (one,) = filter(is_answering, workers)
    workers.remove(one)
    return one


def session_of(fleet: Fleet, worker: FakeWorker) -> SessionBackend:
    session = fleet.relay.pools.session_of(worker.worker)
    assert session is not None
    return session


def wants_move(fleet: Fleet, worker: FakeWorker) -> bool:
    return session_of(fleet, worker).wants_move


async def looked_at(fleet: Fleet) -> None:
    """Until the relay has looked for workers whose requests others are to take."""
    now = time.monotonic()
    await until(lambda: fleet.relay._workers_looked_at > now)


async def test_an_answer_goes_on_at_another_worker(fleet: Fleet) -> None:
    """With what its client has; the prompt is reported once."""
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    began = await first.stream()
    began.push(ChoiceDelta(0, [7, 8]), prompt=PromptReport(2))
    update = await next_update(stream)
    assert update.prompt is not None
    second = await fleet.add()
    await first.die()
    reading = asyncio.create_task(next_update(stream))
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == (ChoiceSoFar([7, 8]),)
    timeout_s = goes_on.submitted.request.timeout_s
    assert timeout_s is not None
    assert timeout_s < 30.0
    goes_on.push(ChoiceDelta(0, [9], finish_reason=END), prompt=PromptReport(3))
    update = await reading
    assert (list(update.deltas[0].token_ids), update.prompt) == ([9], None)
    with pytest.raises(StopAsyncIteration):
        await next_update(stream)
    stream.close()


async def test_choices_that_are_whole_stay_so(fleet: Fleet) -> None:
    first = await fleet.add()
    stream = fleet.relay.submit(request(n=3))
    began = await first.stream()
    began.push(ChoiceDelta(0, [7], finish_reason=END), ChoiceDelta(1, [8]), prompt=PromptReport(0))
    assert await next_tokens(stream) == [7, 8]
    stream.stop_choice(1)
    await until(lambda: began.stopped == [1])
    second = await fleet.add()
    await first.die()
    reading = asyncio.create_task(next_tokens(stream))
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == (
        ChoiceSoFar([7], finished=True),
        ChoiceSoFar([8], finished=True),
        ChoiceSoFar([]),
    )
    goes_on.push(ChoiceDelta(2, [9], finish_reason=END))
    assert await reading == [9]
    stream.close()


async def test_an_answer_that_is_too_long_to_be_sent_elsewhere_is_no_fault_of_its_client(
    fleet: Fleet,
) -> None:
    """Nor is it taken from a worker that only leaves."""
    first = await fleet.add()
    stream = fleet.relay.submit(request(n=2))
    began = await first.stream()
    num_tokens = 0
    while num_tokens < 1_500_000:  # of three bytes
        began.push(ChoiceDelta(0, [200_000] * 300_000))
        num_tokens += len(await next_tokens(stream))
    second = await fleet.add()
    first.sessions.ask_to_move()
    await until(lambda: wants_move(fleet, first))
    began.push(ChoiceDelta(0, [1]))
    assert await next_tokens(stream) == [1]
    await first.die()
    with pytest.raises(StepError, match="^the decode worker is gone, and .* too long"):
        await next_tokens(stream)
    assert not second.answerer.streams
    stream.close()


async def test_an_answer_waits_for_a_worker_to_come(fleet: Fleet) -> None:
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    await first.stream()
    await first.die()
    reading = asyncio.create_task(next_tokens(stream))
    fleet.remove(first)
    second = await fleet.add()
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == ()
    goes_on.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    stream.close()


async def test_a_request_that_workers_die_of_is_not_tried_on_a_third(fleet: Fleet) -> None:
    workers = [await fleet.add() for _ in range(3)]
    stream = fleet.relay.submit(request("poison"))
    reading = asyncio.create_task(next_update(stream))
    for number in range(2):
        victim = await taken(workers)
        victim.answerer.streams[-1].push(ChoiceDelta(0, [number]))
        await reading
        reading = asyncio.create_task(next_update(stream))
        await victim.die()
    with pytest.raises(StepError, match=DOOMED):
        await reading
    assert not workers[0].answerer.streams
    stream.close()


async def test_workers_that_were_dead_before_are_not_its_doing(fleet: Fleet) -> None:
    """A machine with several workers goes at once."""
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await first.stream()
    answer.push(ChoiceDelta(0, [1]), prompt=PromptReport(0))
    assert await next_tokens(stream) == [1]
    second = await fleet.add()
    second.deafen()
    reading = asyncio.create_task(next_tokens(stream))
    await first.die()
    await until(lambda: session_of(fleet, second).num_submitted == 1)
    await second.die()
    third = await fleet.add()
    (await third.stream()).push(ChoiceDelta(0, [2], finish_reason=END))
    assert await reading == [2]
    stream.close()


async def test_nor_is_it_tried_on_a_third_where_they_die_without_a_word(fleet: Fleet) -> None:
    workers = [await fleet.add() for _ in range(3)]
    stream = fleet.relay.submit(request("poison"))
    reading = asyncio.create_task(next_update(stream))
    for _ in range(2):
        victim = await taken(workers)
        session = session_of(fleet, victim)
        await until(lambda: session.num_come == 1)  # noqa: B023 - awaited here
        await victim.die()
    with pytest.raises(StepError, match=DOOMED):
        await reading
    assert not workers[0].answerer.streams
    stream.close()


async def test_nor_where_it_is_their_engines_that_die(fleet: Fleet) -> None:
    """Their processes are there for a while, and answer."""
    workers = [await fleet.add() for _ in range(3)]
    stream = fleet.relay.submit(request("poison"))
    reading = asyncio.create_task(next_update(stream))
    for _ in range(2):
        victim = await taken(workers)
        victim.loads.report.unhealthy = "the engine died"
        await until(lambda: victim.worker not in fleet.relay.pools.usable(Leg.DECODE))  # noqa: B023
        victim.answerer.streams[-1].fail(EngineDiedError("the engine died"))
    with pytest.raises(StepError, match=DOOMED):
        await reading
    assert not workers[0].answerer.streams
    stream.close()


async def test_workers_that_end_a_session_which_was_not_read_have_not_died(fleet: Fleet) -> None:
    """It is this process that stood still, twice."""
    workers = [await fleet.add() for _ in range(3)]
    stream = fleet.relay.submit(request())
    reading = asyncio.create_task(next_tokens(stream))
    for number in range(3):
        slow = await taken(workers)
        slow.answerer.streams[-1].push(ChoiceDelta(0, [number]))
        assert await reading == [number]
        if workers:
            reading = asyncio.create_task(next_tokens(stream))
            for session in slow.sessions._sessions:
                session.fail(Failure(kind=Failure.KIND_BUSY, message="the session was not read"))
    stream.close()


async def test_an_answer_whose_only_worker_s_engine_died_waits_for_another(fleet: Fleet) -> None:
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await first.stream()
    answer.push(ChoiceDelta(0, [1]))
    assert await next_tokens(stream) == [1]
    reading = asyncio.create_task(next_tokens(stream))
    answer.fail(EngineDiedError("the engine died"))
    first.loads.report.unhealthy = "the engine died"
    await until(answer.closed.is_set)
    second = await fleet.add()
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == (ChoiceSoFar([1]),)
    goes_on.push(ChoiceDelta(0, [2], finish_reason=END))
    assert await reading == [2]
    stream.close()


async def test_a_worker_that_leaves_keeps_what_nobody_else_can_take(fleet: Fleet) -> None:
    only = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await only.stream()
    only.sessions.drain()
    only.sessions.ask_to_move()
    await until(lambda: not fleet.relay.pools.usable(Leg.DECODE))
    answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await next_tokens(stream) == [1]
    stream.close()


async def test_a_worker_that_leaves_hands_its_answers_over(fleet: Fleet) -> None:
    """What had come and was not read yet is read first, and not asked for again."""
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await first.stream()
    answer.push(ChoiceDelta(0, [1]))
    assert await next_tokens(stream) == [1]
    second = await fleet.add()
    first.sessions.drain()
    answer.push(ChoiceDelta(0, [2]))
    await until(lambda: first.worker not in fleet.relay.pools.usable(Leg.DECODE))
    first.sessions.ask_to_move()
    await until(answer.closed.is_set)
    assert await next_tokens(stream) == [2]
    reading = asyncio.create_task(next_tokens(stream))
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == (ChoiceSoFar([1, 2]),)
    goes_on.push(ChoiceDelta(0, [3], finish_reason=END))
    assert await reading == [3]
    assert fleet.relay.reroutes == {"left": 1}
    stream.close()


@pytest.mark.parametrize("dies", [True, False])
async def test_a_worker_that_is_lost_is_one_warning_with_many_requests_as_well(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, dies: bool
) -> None:
    caplog.set_level("INFO", "kvrelay")  # as replicas set it
    first = await fleet.add()
    streams = [fleet.relay.submit(request(name)) for name in "abc"]
    await first.stream(2)
    second = await fleet.add()
    reading = [asyncio.create_task(next_tokens(stream)) for stream in streams]
    caplog.clear()
    if dies:
        await first.die()
    else:
        first.sessions.ask_to_move()
    await second.stream(2)
    for answer in second.answerer.streams:
        answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert [await task for task in reading] == [[1]] * 3
    (line,) = [one.message for one in caplog.records if "request" in one.message]
    assert first.address in line
    assert ("broke under 3 requests: " if dies else "3 requests of ") in line
    for stream in streams:
        stream.close()


async def refused_by_the_first(fleet: Fleet) -> tuple[FakeWorker, FakeWorker, RelayStream]:
    first, second = await fleet.add(), await fleet.add()
    second.loads.report.num_waiting = 9  # so that the first is preferred
    await fleet.hear(second)
    stream = fleet.relay.submit(request())
    (await first.stream()).fail(QueueFullError("the queue is full"))
    return first, second, stream


async def test_a_full_worker_s_refusal_goes_to_the_next(fleet: Fleet) -> None:
    _, second, stream = await refused_by_the_first(fleet)
    reading = asyncio.create_task(next_tokens(stream))
    (await second.stream()).push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    assert fleet.relay.reroutes == {"refused": 1}
    stream.close()


async def test_who_refused_it_is_asked_again_when_the_next_one_died(fleet: Fleet) -> None:
    """And not another waited for: it may have room by now."""
    first, second, stream = await refused_by_the_first(fleet)
    reading = asyncio.create_task(next_tokens(stream))
    await second.stream()
    await second.die()
    (await first.stream(1)).push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    assert fleet.relay.reroutes == {"refused": 1, "died": 1}
    stream.close()


@pytest.mark.parametrize("has_time", [True, False])
async def test_who_refused_it_is_asked_again_when_the_next_one_left_before_its_turn(
    fleet: Fleet, has_time: bool
) -> None:
    """Once: the client was told after a while that nobody answers."""
    first, full = await fleet.add(), FakeWorker()
    room = [BlockCounts(total=1000, free=1000)]
    full.loads.report = LoadReport(max_sequences=1, num_running=1, block_size=16, blocks=room)
    await fleet.add(worker=full)
    stream = fleet.relay.submit(request())
    (await first.stream()).fail(QueueFullError("the queue is full"))
    reading = asyncio.create_task(next_tokens(stream))
    await until(lambda: fleet.relay.router.num_waiting == 1)
    fleet.remove(full)
    again = await first.stream(1)
    if has_time:
        again.push(ChoiceDelta(0, [1], finish_reason=END))
        assert await reading == [1]
    else:
        again.fail(QueueFullError("the queue is full"))
        with pytest.raises(QueueFullError):
            await reading
    assert len(first.answerer.streams) == 2
    assert not full.answerer.streams
    stream.close()


async def test_when_all_are_full_the_client_is_told(fleet: Fleet) -> None:
    workers = [await fleet.add(), await fleet.add()]
    stream = fleet.relay.submit(request())
    reading = asyncio.create_task(next_update(stream))
    for _ in workers:
        await until(lambda: any(is_answering(worker) for worker in workers))
        (busy,) = [worker for worker in workers if is_answering(worker)]
        busy.answerer.streams[-1].fail(QueueFullError("the queue is full"))
        await until(busy.answerer.streams[-1].closed.is_set)
    with pytest.raises(QueueFullError):
        await reading
    stream.close()


async def test_an_answer_under_way_is_not_refused_where_as_many_wait_as_may(
    make_fleet: MakeFleet,
) -> None:
    """And goes before those that have not begun."""
    fleet = make_fleet(router=RouterConfig(max_waiting=1))
    room = [BlockCounts(total=1000, free=1000)]
    first, second = FakeWorker(), FakeWorker()
    for worker in (first, second):
        worker.loads.report = LoadReport(max_sequences=1, block_size=16, blocks=room)
    await fleet.add(worker=first)
    stream, new = fleet.relay.submit(request("old")), fleet.relay.submit(request("new"))
    (await first.stream()).push(ChoiceDelta(0, [1]))
    assert await next_tokens(stream) == [1]
    second.loads.report.num_running = 1
    await fleet.add(worker=second)
    reading = asyncio.create_task(next_tokens(stream))
    await first.die()
    await until(lambda: fleet.relay.router.num_waiting == 2)
    second.loads.report.num_running = 0
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == (ChoiceSoFar([1]),)
    goes_on.push(ChoiceDelta(0, [2], finish_reason=END))
    assert await reading == [2]
    for one in (stream, new):
        one.close()


async def test_what_a_worker_drops_at_its_end_waits_for_another_to_come(fleet: Fleet) -> None:
    only = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await only.stream()
    reading = asyncio.create_task(next_tokens(stream))
    only.sessions.drain()
    await until(lambda: not fleet.relay.pools.usable(Leg.DECODE))
    only.sessions.fail_requests(UnavailableError("the worker is draining"))
    await until(answer.closed.is_set)
    second = await fleet.add()
    (await second.stream()).push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    assert fleet.relay.reroutes == {"left": 1}
    stream.close()


async def test_what_its_only_heir_has_refused_stays_with_a_worker_that_leaves(
    fleet: Fleet,
) -> None:
    _, second, stream = await refused_by_the_first(fleet)
    reading = asyncio.create_task(next_tokens(stream))
    answer = await second.stream()
    second.sessions.ask_to_move()
    await until(lambda: wants_move(fleet, second))
    await looked_at(fleet)
    answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    assert fleet.relay.reroutes == {"refused": 1}
    stream.close()


async def test_an_answer_that_one_refuses_waits_for_another_that_is_back_in_a_moment(
    fleet: Fleet,
) -> None:
    """Its connection broke, and is made anew."""
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    began = await first.stream()
    began.push(ChoiceDelta(0, [1]))
    assert await next_tokens(stream) == [1]
    second = await fleet.add()
    reading = asyncio.create_task(next_tokens(stream))
    for session in first.sessions._sessions:
        session.fail(Failure(kind=Failure.KIND_UNAVAILABLE, message="the connection broke"))
    (await second.stream()).fail(QueueFullError("the queue is full"))
    goes_on = await first.stream(1)
    assert goes_on.submitted.request.sent == (ChoiceSoFar([1]),)
    goes_on.push(ChoiceDelta(0, [2], finish_reason=END))
    assert await reading == [2]
    stream.close()


async def test_what_is_wrong_with_a_request_is_wrong_everywhere(fleet: Fleet) -> None:
    first, second = await fleet.add(), await fleet.add()
    stream = fleet.relay.submit(request())
    await until(lambda: is_answering(first) or is_answering(second))
    asked = first if is_answering(first) else second
    asked.answerer.streams[0].fail(RequestError("prompt", "too long"))
    with pytest.raises(RequestError):
        await next_update(stream)
    assert len(first.answerer.streams) + len(second.answerer.streams) == 1
    stream.close()


async def test_a_replica_that_serve_stops_keeps_its_answers_and_gets_no_new_ones(
    fleet: Fleet,
) -> None:
    first = await fleet.add()
    old = fleet.relay.submit(request("old"))
    answer = await first.stream()
    second = await fleet.add()
    fleet.remove(first)
    new = [fleet.relay.submit(request(f"new{number}")) for number in range(3)]
    await second.stream(2)
    answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await next_tokens(old) == [1]
    old.close()
    await until(lambda: first.sessions.num_sessions == 0)  # nothing keeps its session open
    for stream in new:
        stream.close()


async def test_a_replica_that_serve_names_again_is_used_again(fleet: Fleet) -> None:
    """It is left out while Serve changes its settings, with requests under way or without."""
    worker = await fleet.add()
    for number in range(2):
        stream = fleet.relay.submit(request(f"r{number}"))
        answer = await worker.stream(number)
        fleet.remove(worker)
        assert not fleet.relay.pools.usable(Leg.DECODE)
        fleet.name_again(worker)
        assert fleet.relay.pools.usable(Leg.DECODE) == [worker.worker]
        answer.push(ChoiceDelta(0, [1], finish_reason=END))
        assert await next_tokens(stream) == [1]
        stream.close()
        await asyncio.sleep(0)
        fleet.relay.pools.check_gone()
        assert fleet.relay.pools.usable(Leg.DECODE) == [worker.worker]
        assert worker.sessions.num_sessions == 1
    fleet.remove(worker)
    await until(lambda: worker.sessions.num_sessions == 0)
    fleet.name_again(worker)
    await until(lambda: fleet.relay.pools.usable(Leg.DECODE) == [worker.worker])


async def test_a_worker_that_answers_and_makes_no_step_loses_its_requests(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(RelayConfig(stall_s=0.2))
    relay = fleet.relay
    stuck = await fleet.add()
    stream = relay.submit(request())
    answer = await stuck.stream()
    answer.push(ChoiceDelta(0, [1]))
    assert await next_tokens(stream) == [1]
    stuck.loads.report.still_s = 60.0
    reading = asyncio.create_task(next_tokens(stream))
    stays = until(answer.closed.is_set)  # while there is nobody else
    second = await fleet.add()
    await stays
    goes_on = await second.stream()
    assert goes_on.submitted.request.sent == (ChoiceSoFar([1]),)
    goes_on.push(ChoiceDelta(0, [2], finish_reason=END))
    assert await reading == [2]
    assert relay.reroutes == {"stuck": 1}
    stream.close()


async def test_a_worker_that_gets_stuck_while_it_is_stopped_loses_its_requests_too(
    make_fleet: MakeFleet,
) -> None:
    """Not only when it asks for that, which may be an hour later."""
    fleet = make_fleet(RelayConfig(stall_s=0.2))
    stuck = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await stuck.stream()
    second = await fleet.add()
    fleet.remove(stuck)
    stuck.loads.report.still_s = 60.0
    reading = asyncio.create_task(next_tokens(stream))
    await until(answer.closed.is_set)
    (await second.stream()).push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    assert fleet.relay.reroutes == {"stuck": 1}
    stream.close()


async def test_a_request_that_workers_get_stuck_with_is_not_tried_at_all_of_them(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(RelayConfig(stall_s=0.2))
    workers = [await fleet.add() for _ in range(4)]
    stream = fleet.relay.submit(request("poison"))
    reading = asyncio.create_task(next_update(stream))
    for _ in range(3):
        victim = await taken(workers)
        victim.loads.report.still_s = 60.0
        await until(victim.answerer.streams[-1].closed.is_set)
    with pytest.raises(StepError, match="^3 workers died or got stuck under request poison$"):
        await reading
    assert not workers[0].answerer.streams
    assert fleet.relay.reroutes == {"stuck": 2}
    stream.close()


async def test_a_worker_that_was_stuck_and_goes_on_is_as_good_as_any(fleet: Fleet) -> None:
    stuck = await fleet.add()
    stream = fleet.relay.submit(request())
    await stuck.stream()
    reading = asyncio.create_task(next_tokens(stream))
    full = FakeWorker()
    room = [BlockCounts(total=1000, free=1000)]
    full.loads.report = LoadReport(max_sequences=1, num_running=1, block_size=16, blocks=room)
    await fleet.add(worker=full)
    stuck.loads.report.still_s = 60.0
    await until(lambda: fleet.relay.router.num_waiting == 1)
    stuck.loads.report.still_s = 0.0
    (await stuck.stream(1)).push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    assert not full.answerer.streams
    stream.close()


async def test_a_worker_that_leaves_inherits_nothing_though_it_is_idle(fleet: Fleet) -> None:
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await first.stream()
    idle = await fleet.add()
    idle.sessions.ask_to_move()
    await until(lambda: wants_move(fleet, idle))
    first.sessions.ask_to_move()
    await until(lambda: wants_move(fleet, first))
    await looked_at(fleet)
    answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await next_tokens(stream) == [1]
    assert not idle.answerer.streams
    stream.close()


async def test_what_is_to_be_moved_goes_when_there_is_somebody(fleet: Fleet) -> None:
    """A worker asks once, and its ingresses may know no other one that answers just then."""
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await first.stream()
    session = session_of(fleet, first)
    fleet.remove(first)
    first.sessions.ask_to_move()
    await until(lambda: session.wants_move)
    reading = asyncio.create_task(next_tokens(stream))
    second = await fleet.add()
    await until(answer.closed.is_set)
    (await second.stream()).push(ChoiceDelta(0, [1], finish_reason=END))
    assert await reading == [1]
    assert fleet.relay.reroutes == {"left": 1}
    stream.close()


async def test_workers_that_all_leave_keep_what_they_have(fleet: Fleet) -> None:
    """An old model's last ones, that would else hand it to and fro."""
    first, second = await fleet.add(), await fleet.add()
    streams = [fleet.relay.submit(request(name)) for name in "ab"]
    await until(lambda: is_answering(first) and is_answering(second))
    first.sessions.ask_to_move()
    await until(lambda: not is_answering(first))
    reading = [asyncio.create_task(next_tokens(stream)) for stream in streams]
    await second.stream(1)
    second.sessions.ask_to_move()
    await until(lambda: wants_move(fleet, second))
    for answer in second.answerer.streams:
        answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert [await task for task in reading] == [[1], [1]]
    assert len(first.answerer.streams) == 1
    for stream in streams:
        stream.close()


def with_places(num: int, num_running: int = 0) -> FakeWorker:
    worker = FakeWorker()
    room = [BlockCounts(total=1000, free=1000)]
    worker.loads.report = LoadReport(
        max_sequences=num, num_running=num_running, block_size=16, blocks=room
    )
    return worker


async def test_as_many_places_are_waited_for_as_choices_are_left(fleet: Fleet) -> None:
    first = await fleet.add()
    stream = fleet.relay.submit(request(n=3))
    answer = await first.stream()
    answer.push(ChoiceDelta(0, [1], finish_reason=END))
    assert await next_tokens(stream) == [1]
    heir = await fleet.add(worker=with_places(2, num_running=1))
    reading = asyncio.create_task(next_tokens(stream))
    await first.die()
    await until(lambda: fleet.relay.router.num_waiting == 1)
    await looked_at(fleet)
    assert not heir.answerer.streams
    heir.loads.report.num_running = 0
    goes_on = await heir.stream()
    goes_on.push(ChoiceDelta(1, [2], finish_reason=END), ChoiceDelta(2, [3], finish_reason=END))
    assert await reading == [2, 3]
    stream.close()


async def test_of_those_that_were_moved_who_came_first_goes_first(make_fleet: MakeFleet) -> None:
    """Whose client reads sooner that its worker is gone has waited no longer."""
    fleet = make_fleet(router=RouterConfig(overdue_s=0.0))
    first = await fleet.add()
    old, new = fleet.relay.submit(request("old")), fleet.relay.submit(request("new"))
    await first.stream(1)
    heir = await fleet.add(worker=with_places(1, num_running=1))
    reading = [asyncio.create_task(next_tokens(new))]
    await first.die()
    await until(lambda: fleet.relay.router.num_waiting == 1)
    reading.append(asyncio.create_task(next_tokens(old)))
    await until(lambda: fleet.relay.router.num_waiting == 2)
    heir.loads.report.num_running = 0
    goes_on = await heir.stream()
    assert goes_on.submitted.request.request_id.endswith("old")
    goes_on.push(ChoiceDelta(0, [1], finish_reason=END))
    (await heir.stream(1)).push(ChoiceDelta(0, [2], finish_reason=END))
    assert await asyncio.gather(*reading) == [[2], [1]]
    for stream in (old, new):
        stream.close()


async def test_a_moved_answer_waits_for_room_for_what_it_has(fleet: Fleet) -> None:
    first = await fleet.add()
    stream = fleet.relay.submit(request())
    answer = await first.stream()
    answer.push(ChoiceDelta(0, [1] * 400))
    assert len(await next_tokens(stream)) == 400
    heir = with_places(2, num_running=1)
    (room,) = heir.loads.report.blocks
    room.free = 70  # of 16 tokens; what runs there is left 50
    await fleet.add(worker=heir)
    reading = asyncio.create_task(next_tokens(stream))
    await first.die()
    await until(lambda: fleet.relay.router.num_waiting == 1)
    await looked_at(fleet)
    assert not heir.answerer.streams
    room.free = 1000
    (await heir.stream()).push(ChoiceDelta(0, [2], finish_reason=END))
    assert await reading == [2]
    stream.close()


async def test_a_new_request_that_all_who_answer_refuse_waits_for_nobody(fleet: Fleet) -> None:
    """Its client has nothing yet, and can ask again."""
    first, gone = await fleet.add(), await fleet.add()
    await gone.die()
    await until(lambda: fleet.relay.pools.usable(Leg.DECODE) == [first.worker])
    assert fleet.relay.pools.names_decode({first.worker})
    stream = fleet.relay.submit(request())
    (await first.stream()).fail(QueueFullError("the queue is full"))
    with pytest.raises(QueueFullError):
        await next_update(stream)
    stream.close()
