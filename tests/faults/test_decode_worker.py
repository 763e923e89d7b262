"""A decode worker dies, stops or fails at every point of a hand-off; clients leave at any."""

import asyncio
import json
import signal
import time
from contextlib import aclosing
from dataclasses import replace

import pytest

from decode_worker.answerer import LocalPrefill, PrefillCandidate, PrefixSource
from engine.errors import UnavailableError
from kv_transfer.faults import BREAK, POSTED, READ
from protos.events_pb2 import LoadReport
from protos.worker_pb2 import DrainProgress
from tests.engine.pair import Answer
from tests.faults.cached import names
from tests.faults.conftest import ANY_CONNECTOR, PARAMS, PROMPTS
from tests.faults.workers import NOTICED_HERE_S, NOTICED_S, Relay, leased, leave
from tests.forked import forked

pytestmark = pytest.mark.asyncio(loop_scope="module")

Expected = dict[str, Answer]
POINTS = ["puller.chunk:2", "puller.reading", "puller.finished", "puller.commit"]
KILLS = ["worker.reserved", "puller.reading:2", "puller.finished", "puller.commit"]
STOPS = ["puller.chunk:2", "puller.reading", "puller.commit"]
# Of 10 ms each, before every step: what begins then is under way still when a test has looked.
SLOW = " ".join(f"worker.reserved:{number}=slow" for number in range(1, 6))


@pytest.fixture(scope="module")
def stuck_after_s() -> float:
    """Much longer than tests look at a prompt whose holder says nothing more."""
    return 30.0


@pytest.mark.parametrize("point", KILLS)
async def test_killed(relay: Relay, point: str) -> None:
    relay.decode.set_faults(f"{point}=kill")
    shown = Answer()
    with pytest.raises(UnavailableError):
        await relay.ask(PROMPTS["300"], PARAMS, salt=f"kill {point}", shown=shown)
    assert shown == Answer()
    await relay.first.check_settled()
    await relay.decode.restart()
    await relay.reconnect()


@pytest.mark.parametrize("point", STOPS)
async def test_stopped(relay: Relay, point: str) -> None:
    """Its client and the holder notice, each by its own stream; when it goes on, nothing comes
    of what it had begun."""
    before, commits = await names(relay.decode), await relay.first.num_commits()
    relay.decode.set_faults(f"{point}=stop")
    shown = Answer()
    asked = asyncio.ensure_future(
        relay.ask(PROMPTS["300"], PARAMS, salt=f"stop {point}", shown=shown)
    )
    await relay.decode.stopped()
    stopped = time.monotonic()
    with pytest.raises(UnavailableError):
        await asked
    assert time.monotonic() - stopped < NOTICED_HERE_S
    await relay.first.until(lambda load: load.num_leases == 0)
    assert time.monotonic() - stopped < NOTICED_HERE_S
    await relay.first.check_settled()
    relay.decode.go_on()
    await relay.decode.check_settled()
    assert shown == Answer()
    assert await names(relay.decode) <= before
    assert await relay.first.num_commits() == commits
    await relay.reconnect()


async def test_stopped_before_it_has_asked(relay: Relay) -> None:
    """What it asks for when it goes on comes too late: nobody is there any more."""
    commits = await relay.first.num_commits()
    relay.first.set_faults("source.open=stuck")  # until it has noticed
    relay.decode.set_faults("worker.reserved=stop")
    asked = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, relay.first, salt="unasked"))
    await relay.decode.stopped()
    stopped = time.monotonic()
    with pytest.raises(UnavailableError):
        await asked
    assert time.monotonic() - stopped < NOTICED_HERE_S
    relay.decode.go_on()
    await relay.decode.check_settled()
    relay.first.go_on()
    await relay.first.check_settled()
    assert await relay.first.num_commits() == commits
    await relay.reconnect()


@pytest.mark.parametrize("point", POINTS)
async def test_a_failure_is_another_ones_turn(relay: Relay, expected: Expected, point: str) -> None:
    steps = (await relay.second.load()).num_steps
    relay.decode.set_faults(f"{point}=fail")
    told = await relay.ask(PROMPTS["300"], PARAMS, salt=f"fail {point}")
    told.check_equal(expected["300"])
    assert (await relay.second.load()).num_steps > steps


@ANY_CONNECTOR
async def test_told_to_end_it_fetches_and_answers_what_it_has_begun(
    relay: Relay, expected: Expected
) -> None:
    for holder in (relay.first, relay.second):
        holder.set_faults("source.open=stuck")  # until all of them have come
    asked = [relay.ask(PROMPTS["300"], PARAMS, salt=f"ending {i}") for i in range(8)]
    told = asyncio.gather(*asked)
    await relay.decode.until(lambda load: load.num_fetching == 8)
    relay.decode.set_faults("puller.reading:4=hold")
    for holder in (relay.first, relay.second):
        holder.set_faults("")
    await relay.decode.held_at("puller.reading")
    relay.decode.send(signal.SIGTERM)
    relay.decode.set_faults("")
    for one in await told:
        one.check_equal(expected["300"])
    assert await relay.decode.died() == 0
    await relay.first.check_settled()
    await relay.decode.restart()
    await relay.reconnect()


@ANY_CONNECTOR
async def test_what_is_left_when_it_has_drained_long_enough_fails(relay: Relay) -> None:
    """A prompt that never comes, as its holder is stopped and its link not given up yet."""
    relay.first.set_faults("holder.chunk:2=stop")
    begun = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, relay.first, salt="left"))
    await relay.first.stopped()
    progress = await relay.decode.drain(deadline_s=0.3)
    assert progress[0].num_sequences == 1
    assert progress[-1] == DrainProgress(done=True)
    with pytest.raises(UnavailableError, match="draining"):
        await begun
    relay.first.go_on()
    await relay.decode.check_settled()
    await relay.decode.restart()
    await relay.reconnect()


async def test_an_engine_that_is_stuck_is_seen(relay: Relay, expected: Expected) -> None:
    """By its steps, which stand still, and by whoever asks for the worker's health."""
    relay.decode.set_faults("worker.reserved=stuck")
    asked = [relay.ask(PROMPTS["300"], PARAMS, salt=f"stuck {i}") for i in range(4)]
    told = asyncio.gather(*asked)
    seen: list[LoadReport] = []
    async with aclosing(relay.decode.loads(period_ms=50)) as reports:
        async for report in reports:
            seen += [report] if report.unhealthy else []
            if len(seen) == 2:
                break
    reason = "work is queued and no step was made for"
    assert all(reason in report.unhealthy for report in seen)
    assert seen[0].num_steps == seen[1].num_steps
    health = await relay.decode.health()
    assert not health.healthy
    assert reason in health.reason
    assert health.num_steps == seen[0].num_steps
    relay.decode.set_faults("")
    for one in await told:
        one.check_equal(expected["300"])
    assert (await relay.decode.load()).num_steps > health.num_steps


@ANY_CONNECTOR
async def test_an_event_loop_that_is_blocked_is_seen(relay: Relay, expected: Expected) -> None:
    """Its reports stop, which must come twice a second; nobody's connection breaks."""
    async with aclosing(relay.decode.loads(period_ms=100)) as reports:
        await anext(reports)
        relay.decode.set_faults("puller.chunk=hold")
        asked = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, salt="blocked"))
        await relay.decode.held_at("puller.chunk")
        report = asyncio.ensure_future(anext(reports))
        while (await asyncio.wait({report}, timeout=NOTICED_S))[0]:  # before it was held
            report = asyncio.ensure_future(anext(reports))
        relay.decode.set_faults("")
        await report
        (await asked).check_equal(expected["300"])


@ANY_CONNECTOR
async def test_a_client_that_leaves_while_nobody_can_be_reached(relay: Relay) -> None:
    """Who might compute its prompt is tried again and again."""
    nobody = PrefillCandidate("127.0.0.1:9")
    asked = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, nobody))
    await relay.decode.until(lambda load: load.num_fetching == 1)
    await leave(asked)
    await relay.decode.until(lambda load: load.num_fetching == 0)


@pytest.mark.parametrize("point", ["source.open", "holder.chunk:2", "holder.finished"])
async def test_a_client_that_leaves_while_its_prompt_is_fetched(relay: Relay, point: str) -> None:
    """The holder says nothing more: before a chunk, between two, when all has been announced."""
    relay.first.set_faults(f"{point}=stop")
    prompt, salt = PROMPTS["300"], f"leave {point}"
    asked = asyncio.ensure_future(relay.ask(prompt, PARAMS, relay.first, salt=salt))
    await relay.first.stopped()
    await relay.decode.until(lambda load: load.num_fetching == 1)
    await leave(asked)
    await relay.decode.until(lambda load: load.num_fetching == 0)
    relay.first.go_on()


@pytest.mark.parametrize(("name", "num_blocks"), [("300", 4), ("33", 3)])
async def test_a_client_that_leaves_while_a_read_is_under_way(
    relay: Relay, name: str, num_blocks: int
) -> None:
    """Of the first of five chunks, the last of which is computed still; and of the only one, when
    the first tokens are there. Its blocks wait in quarantine, of which there may be two, for the
    read's end."""
    first, decode = relay.first, relay.decode
    await relay.ask(PROMPTS["33"], PARAMS, first)  # the link's first read
    first.set_faults("holder.chunk:5=hold")
    decode.set_faults(f"{POSTED}=hold puller.finished=stop")
    asked = asyncio.ensure_future(relay.ask(PROMPTS[name], PARAMS, first, salt=f"leave {name}"))
    await (first.held_at("holder.chunk") if name == "300" else decode.stopped())
    decode.send(signal.SIGCONT)  # the read is held still
    await decode.held_at(POSTED)
    await decode.until(lambda load: (load.num_fetching, load.transfer.num_reads) == (1, 1))
    await leave(asked)
    load = await decode.until(lambda load: load.transfer.num_quarantined_reads == 1)
    assert load.unhealthy == f"{num_blocks} blocks are in quarantine, at most 2 may be"
    health = await decode.health()
    assert (health.healthy, health.reason) == (False, load.unhealthy)


@ANY_CONNECTOR
async def test_a_client_that_leaves_while_its_prompt_is_computed_here(relay: Relay) -> None:
    """Chunk by chunk: eight steps, each of which twenty others have made slower."""
    relay.decode.set_faults(" ".join(f"worker.reserved:{i}=slow" for i in range(1, 21)))
    one = replace(PARAMS, max_tokens=1)
    others = [relay.ask(PROMPTS["33"], one, salt=f"slow {i}") for i in range(20)]
    await asyncio.gather(*others)
    before = (await relay.decode.load()).num_query_tokens
    prompt = [*PROMPTS["300"], *PROMPTS["100"], *PROMPTS["100"]]
    asked = asyncio.ensure_future(relay.ask(prompt, PARAMS, local=LocalPrefill.ALWAYS))
    await relay.decode.until(lambda load: load.num_running == 1)
    await leave(asked)
    await relay.decode.until(lambda load: load.num_running == 0)
    relay.decode.set_faults("")  # which keep its engine awake, as if it had something to do
    await relay.decode.check_settled()
    assert (await relay.decode.load()).num_query_tokens == before, "it was not read to its end"


@pytest.mark.parametrize("puller", ["decode", "prefill"])
async def test_a_client_that_leaves_while_a_prefix_is_pulled(relay: Relay, puller: str) -> None:
    """From the second prefill worker, which is asked as no link to it is known yet, and stops
    before it announces what it has."""
    salt, has, prompt = f"prefix for {puller}", relay.second, PROMPTS["300"]
    gone = (await has.load()).incarnation
    await has.restart()
    await relay.decode.until_lost(gone)
    async with leased(has, prompt, PARAMS, salt):
        pass
    source = PrefixSource(has.address, (await has.load()).incarnation, 288)
    pulls = relay.decode if puller == "decode" else relay.first
    local = LocalPrefill.ALWAYS if puller == "decode" else LocalPrefill.NEVER
    before = (await pulls.load()).num_prefix_tokens
    has.set_faults("holder.chunk=stop")
    asked = asyncio.ensure_future(
        relay.ask(prompt, PARAMS, relay.first, local=local, salt=salt, sources=[source])
    )
    await has.stopped()
    await pulls.until(lambda load: load.num_fetching == 1)
    await leave(asked)
    for worker in (pulls, relay.decode):
        await worker.until(lambda load: load.num_fetching == 0)
    has.go_on()
    await has.check_settled()
    assert (await pulls.load()).num_prefix_tokens == before


async def test_a_client_that_leaves_between_an_early_commit_and_the_first_tokens(
    relay: Relay,
) -> None:
    """All has been read, which over sockets a holder that is stopped would not let happen."""
    first, decode = relay.first, relay.decode
    first.set_faults("holder.finished=hold")
    decode.set_faults("puller.commit=stop")
    asked = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, first, salt="leave early"))
    await decode.stopped()
    await first.held_at("holder.finished")
    decode.go_on()
    await decode.until(lambda load: (load.num_fetching, load.transfer.num_reads) == (1, 0))
    await leave(asked)
    await decode.until(lambda load: load.num_fetching == 0)
    first.go_on()


async def test_a_client_that_leaves_between_commit_and_verdict(relay: Relay) -> None:
    """The tokens were there before the last read ended."""
    first, decode = relay.first, relay.decode
    await relay.ask(PROMPTS["33"], PARAMS, first)  # the link's first read
    first.set_faults("holder.commit=stop")
    decode.set_faults(f"{POSTED}=hold puller.finished=hold")
    asked = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, first, salt="leave"))
    await decode.held_at("puller.finished")
    decode.set_faults("")
    await first.stopped()
    await leave(asked)
    await decode.until(lambda load: load.num_fetching == 0)
    first.go_on()


async def test_clients_that_leave_a_queue_and_a_batch(relay: Relay, expected: Expected) -> None:
    """Eight run, as many as may; one of them and all that wait leave, but for one."""
    relay.decode.set_faults(SLOW)
    long = replace(PARAMS, max_tokens=400)
    running = [
        asyncio.ensure_future(relay.ask(PROMPTS["33"], long, salt=f"running {i}")) for i in range(8)
    ]
    await relay.decode.until(lambda load: load.num_running == 8)
    waiting = [
        asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, salt=f"waiting {i}"))
        for i in range(3)
    ]
    await relay.decode.until(lambda load: load.num_waiting == 3)
    await leave(*waiting[:2])
    await relay.decode.until(lambda load: load.num_waiting == 1)
    await leave(running[0])
    (await waiting[2]).check_equal(expected["300"])
    await leave(*running[1:])


async def test_a_read_that_fails_does_not_poison_the_pair(relay: Relay, expected: Expected) -> None:
    await relay.ask(PROMPTS["33"], PARAMS, relay.first)  # the link's first read
    peer, steps = (await relay.first.load()).incarnation, (await relay.second.load()).num_steps
    relay.decode.set_faults(f"{READ}:2={BREAK}")
    told = await relay.ask(PROMPTS["300"], PARAMS, salt="broken")
    told.check_equal(expected["300"])
    assert (await relay.second.load()).num_steps > steps
    await relay.decode.until_lost(peer)
    told = await relay.ask(PROMPTS["250"], PARAMS, relay.first, salt="mended")
    told.check_equal(expected["250"])


async def test_clients_that_leave_at_any_time(relay: Relay) -> None:
    async def leave_after(seconds: float) -> None:
        name = f"leaving {seconds}"
        asked = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, salt=name))
        await asyncio.wait({asked}, timeout=seconds)
        asked.cancel()
        await asyncio.wait({asked})

    for turn in range(4):
        await asyncio.gather(*(leave_after(0.004 * i + 0.001 * turn) for i in range(12)))


async def test_a_session_that_breaks(relay: Relay) -> None:
    """Of what is written, what is fetched and what waits nothing goes on."""
    num_tokens = 400
    long = replace(PARAMS, max_tokens=num_tokens)
    relay.decode.set_faults(SLOW)
    asked = [
        asyncio.ensure_future(relay.ask(PROMPTS["33"], long, salt=f"written {i}")) for i in range(7)
    ]
    load = await relay.decode.until(lambda load: load.num_running == 7)
    relay.first.set_faults("holder.chunk:2=stop")
    fetched = relay.ask(PROMPTS["300"], PARAMS, relay.first, salt="fetched")
    asked.append(asyncio.ensure_future(fetched))
    await relay.first.stopped()
    await relay.decode.until(lambda load: load.num_fetching == 1)
    waits = relay.ask(PROMPTS["33"], long, salt="waits")
    asked.append(asyncio.ensure_future(waits))
    await relay.decode.until(lambda load: load.num_waiting == 1)
    assert not any(one.done() for one in asked)
    await relay.session.stop()
    for one in asked:
        with pytest.raises(UnavailableError):
            await one
    left = await relay.decode.until(lambda load: not (load.num_running or load.num_waiting))
    assert left.num_steps - load.num_steps < num_tokens
    await relay.decode.until(lambda load: not load.num_fetching)
    await relay.connect()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_ingress_that_dies_or_stops(relay: Relay, number: signal.Signals) -> None:
    """Seven of its requests are answered, one is fetched and one waits."""
    num_tokens = 470
    relay.decode.set_faults(SLOW)
    relay.first.set_faults("holder.chunk:2=stop")
    jobs: list[tuple[list[int], int, str]] = [
        *[(PROMPTS["33"], num_tokens, relay.second.address)] * 7,
        (PROMPTS["300"], 6, relay.first.address),
        (PROMPTS["33"], num_tokens, relay.second.address),
    ]
    words = json.dumps([relay.decode.address, jobs])
    async with forked("tests.faults.ingress", words) as ingress:
        await relay.first.stopped()
        load = await relay.decode.until(
            lambda load: (load.num_running, load.num_fetching, load.num_waiting) == (7, 1, 1)
        )
        ingress.send_signal(number)
        gone = time.monotonic()
        left = await relay.decode.until(
            lambda load: not (load.num_running or load.num_fetching or load.num_waiting)
        )
        assert time.monotonic() - gone < NOTICED_HERE_S
        assert left.num_steps - load.num_steps < num_tokens
