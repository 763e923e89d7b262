"""A prefill worker dies, stops, is stuck or lies, at every point of a hand-off."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc.aio
import pytest

from decode_worker.answerer import LocalPrefill, PrefillCandidate
from engine.errors import UnavailableError
from kv_transfer.faults import DAMAGE, POSTED, READ, TWICE
from kv_transfer.probe import FIRST_READ_TIMEOUT_S
from protos.events_pb2 import LoadReport
from protos.generation_pb2 import Failure
from protos.handoff_pb2 import Ask, Commit, HolderMessage, PullerMessage
from protos.handoff_pb2_grpc import HandOffStub
from protos.rpc import PROTOCOL
from protos.worker_pb2 import DrainProgress
from tests.engine.pair import Answer
from tests.faults.cached import names
from tests.faults.conftest import ANY_CONNECTOR, PARAMS, PROMPTS
from tests.faults.wire import Wire, wire
from tests.faults.workers import (
    NOTICED_HERE_S,
    NOTICED_S,
    RESTARTED_S,
    SLACK_S,
    Relay,
    cached,
    held,
    kill_readers,
    leased,
)
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Expected = dict[str, Answer]
NUM_FILLING = 31  # prompts, with their answers 19 full blocks each, that fill a cache of 511
NUM_SPARE = 16  # two for each that runs: of its last, partial block and of what it might need
POINTS = ["holder.ask", "holder.chunk:2", "holder.finished", "holder.commit"]
# What a client is told; the log says of each why.
NOBODY = "no prefill worker could serve"


@pytest.mark.parametrize("point", POINTS)
async def test_killed(relay: Relay, expected: Expected, point: str) -> None:
    relay.first.set_faults(f"{point}=kill")
    told = await relay.ask(PROMPTS["300"], PARAMS, salt=f"kill {point}")
    told.check_equal(expected["300"])
    await relay.first.died()
    steps = (await relay.second.load()).num_steps
    assert steps > 0
    await relay.first.restart()
    # another incarnation at the same address is another peer, and serves
    told = await relay.ask(PROMPTS["33"], PARAMS, relay.first, salt=f"after {point}")
    told.check_equal(expected["33"])
    assert (await relay.second.load()).num_steps == steps


@pytest.mark.parametrize("point", POINTS)
async def test_stopped(relay: Relay, expected: Expected, point: str) -> None:
    """Its link notices, however patient the hand-off; when it goes on, nothing comes of what it had
    begun: whatever it still says, the blocks of the answer stay what they are."""
    first, decode, salt = relay.first, relay.decode, f"stop {point}"
    peer = (await first.load()).incarnation
    first.set_faults(f"{point}=stop")
    asked = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, salt=salt))
    await first.stopped()
    stopped = time.monotonic()
    await decode.until_lost(peer)
    assert time.monotonic() - stopped < NOTICED_HERE_S
    (await asked).check_equal(expected["300"])
    whole = [*PROMPTS["300"], *expected["300"].tokens[0]]
    before = await cached(decode, whole, salt)
    again = asyncio.ensure_future(relay.ask(PROMPTS["250"], PARAMS, salt=f"during {point}"))
    first.go_on()
    (await again).check_equal(expected["250"])
    await first.check_settled()
    assert await cached(decode, whole, salt) == before, "with their checksums"
    told = await relay.ask(PROMPTS["33"], PARAMS, first, salt=f"noticed {point}")
    told.check_equal(expected["33"])


@pytest.mark.parametrize(
    ("point", "number"),
    [(POSTED, signal.SIGKILL), (POSTED, signal.SIGSTOP), (READ, signal.SIGSTOP)],
)
async def test_its_stream_breaks_while_it_is_read(
    relay: Relay, expected: Expected, point: str, number: signal.Signals
) -> None:
    """Bytes may come still, of a READ that begins late too: until it has ended nobody gets its
    blocks, though all others are used anew meanwhile, and no request waits for it."""
    first, decode, name = relay.first, relay.decode, f"{point} {number.name}"
    for worker in (first, relay.second):
        await relay.ask(PROMPTS["33"], PARAMS, worker)  # the link's first read
    decode.set_faults(f"{point}=hold")
    asked = asyncio.ensure_future(relay.ask(PROMPTS["32"], PARAMS, salt=name))
    await decode.held_at(point)
    await decode.until(one_read_is_under_way)
    peer = (await first.load()).incarnation
    first.send(number)
    await (first.died() if number is signal.SIGKILL else first.stopped())
    broke = time.monotonic()
    await decode.until(one_read_is_quarantined)
    await decode.until_lost(peer)
    assert time.monotonic() - broke < NOTICED_HERE_S
    (await asked).check_equal(expected["32"])

    salts = [f"{name} {i}" for i in range(NUM_FILLING)]
    asks = [relay.ask(PROMPTS["300"], PARAMS, local=LocalPrefill.ALWAYS, salt=s) for s in salts]
    for told in await asyncio.gather(*asks):
        told.check_equal(expected["300"])
    whole = [*PROMPTS["300"], *expected["300"].tokens[0]]
    before = [await cached(decode, whole, salt) for salt in salts]
    counts = (await decode.until(lambda load: not load.blocks[0].held)).blocks[0]
    assert counts.cached == len({b for runs in before for run in runs for b in run.blocks})
    assert counts.free < NUM_SPARE, "they all have been used"
    assert counts.quarantined == 2
    report = await decode.health()
    assert report.healthy, report.reason

    decode.set_faults("")
    load = await decode.until(lambda load: not load.blocks[0].quarantined)
    assert load.blocks[0].free == counts.free + 2
    assert before == [await cached(decode, whole, salt) for salt in salts]
    if number is signal.SIGKILL:
        await first.restart()


def one_read_is_under_way(load: LoadReport) -> bool:
    """For which two blocks are reserved."""
    counts = (load.num_fetching, load.transfer.num_reads, load.blocks[0].reserved)
    return counts == (1, 1, 2)


def one_read_is_quarantined(load: LoadReport) -> bool:
    """With its two blocks, of which the engine says so a little later."""
    return load.transfer.num_quarantined_reads == 1 and load.blocks[0].quarantined == 2


@pytest.mark.parametrize("break_off", [Wire.cut, Wire.fall_silent])
async def test_its_stream_alone_breaks_while_it_is_read(
    relay: Relay, expected: Expected, break_off: Callable[[Wire], None]
) -> None:
    """Both workers live, and the read goes on: it has its blocks until it ends, its holder none
    that are held for it."""
    first, decode, name = relay.first, relay.decode, break_off.__name__
    async with wire(first.address) as between:
        far = PrefillCandidate(between.address)
        await relay.ask(PROMPTS["33"], PARAMS, far)  # the link's first read
        await relay.ask(PROMPTS["33"], PARAMS, relay.second)
        decode.set_faults(f"{POSTED}=hold")
        asked = asyncio.ensure_future(
            relay.ask(PROMPTS["32"], PARAMS, far, relay.second, salt=name)
        )
        await decode.held_at(POSTED)
        await first.until(lambda load: load.num_leases == 1)
        break_off(between)
        broke = time.monotonic()
        await decode.until(one_read_is_quarantined)
        await first.until(lambda load: load.num_leases == 0)
        assert time.monotonic() - broke < NOTICED_HERE_S
        (await asked).check_equal(expected["32"])
        decode.set_faults("")
        await decode.until(lambda load: not load.blocks[0].quarantined)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_it_goes_while_a_link_to_it_is_made(
    relay: Relay, expected: Expected, number: signal.Signals
) -> None:
    """Before the first READ, for which nixl needs its help. When it goes on or comes back, a link
    is made as if nobody had tried."""
    first, decode, name = relay.first, relay.decode, number.name
    gone = (await first.load()).incarnation
    await first.restart()
    await decode.until_lost(gone)
    decode.set_faults(f"{READ}=hold")
    asked = asyncio.ensure_future(relay.ask(PROMPTS["250"], PARAMS, salt=name))
    await decode.held_at(READ)
    first.send(number)
    await (first.died() if number is signal.SIGKILL else first.stopped())
    went = time.monotonic()
    decode.set_faults("")
    (await asked).check_equal(expected["250"])  # by the other one
    assert time.monotonic() - went < FIRST_READ_TIMEOUT_S, "it was not waited for"
    if number is signal.SIGKILL:
        await first.restart()
    first.go_on()
    told = await relay.ask(PROMPTS["33"], PARAMS, first, salt=f"after {name}")
    told.check_equal(expected["33"])


async def test_its_readers_are_killed_in_mid_transfer(relay: Relay) -> None:
    """Every one of 20, five at once."""
    await kill_readers(relay.first, [5] * 4)


async def test_what_is_said_twice_or_on_another_stream_moves_no_lease(relay: Relay) -> None:
    commit, num_commits = PullerMessage(commit=Commit()), await relay.first.num_commits()
    async with (
        leased(relay.first, PROMPTS["300"], PARAMS, "mine") as mine,
        leased(relay.first, PROMPTS["300"], PARAMS, "another's") as another,
        leased(relay.first, PROMPTS["300"], PARAMS, "a third's") as third,
    ):
        stray = HandOffStub(relay.first.channel).Open()
        await stray.write(commit)
        assert _kind(await stray.read()) == Failure.KIND_INVALID
        assert (await relay.first.load()).num_leases == 3
        await another.write(PullerMessage(ask=Ask(protocol=PROTOCOL)))
        assert _kind(await another.read()) == Failure.KIND_INVALID
        await relay.first.until(lambda load: load.num_leases == 2)
        relay.first.send(signal.SIGSTOP)  # so that it finds both commits of the third
        await relay.first.stopped()
        for stream in (mine, third, third):
            await stream.write(commit)
        relay.first.go_on()
        for stream in (mine, third):
            verdict = await stream.read()
            assert isinstance(verdict, HolderMessage)
            assert verdict.verdict.held
            assert await stream.read() is grpc.aio.EOF
        await relay.first.until(lambda load: load.num_leases == 0)
    assert await relay.first.num_commits() == num_commits + 2


async def test_an_engine_that_is_stuck_behind_a_loop_that_answers(
    relay: Relay, expected: Expected
) -> None:
    relay.first.set_faults("source.open=stuck")
    started = time.monotonic()
    told = await relay.ask(PROMPTS["300"], PARAMS, salt="stuck")
    told.check_equal(expected["300"])
    assert 1.0 < time.monotonic() - started < 1.0 + SLACK_S
    assert relay.decode.has_said("the holder's engine is stuck"), "its turns stood still"


@ANY_CONNECTOR
async def test_a_blocked_event_loop_behind_a_connection_that_answers(
    relay: Relay, expected: Expected
) -> None:
    relay.first.set_faults("source.open=block")
    started = time.monotonic()
    told = await relay.ask(PROMPTS["300"], PARAMS, salt="blocked")
    told.check_equal(expected["300"])
    assert time.monotonic() - started < NOTICED_S + SLACK_S


@ANY_CONNECTOR
async def test_told_to_end_it_hands_over_what_it_has_begun(
    relay: Relay, expected: Expected
) -> None:
    relay.first.set_faults("holder.chunk:2=hold")
    begun = asyncio.ensure_future(held(relay.first, PROMPTS["300"], PARAMS, "begun"))
    await relay.first.held_at("holder.chunk")
    others = [relay.ask(PROMPTS["250"], PARAMS, salt=f"ending {i}") for i in range(6)]
    later = asyncio.gather(*others)
    await asyncio.sleep(0)
    await until(lambda: relay.session.num_come == relay.session.num_submitted)
    relay.first.send(signal.SIGTERM)
    relay.first.set_faults("")
    assert await begun
    for told in await later:
        told.check_equal(expected["250"])
    assert await relay.first.died() == 0
    await relay.first.restart()


@ANY_CONNECTOR
async def test_what_is_left_when_it_has_drained_long_enough_ends(
    relay: Relay, expected: Expected
) -> None:
    """One puller says nothing more, another one is stopped in the middle."""
    async with leased(relay.first, PROMPTS["300"], PARAMS, "silent") as silent:
        relay.decode.set_faults("puller.chunk:2=hold")
        begun = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, salt="drained"))
        await relay.decode.held_at("puller.chunk")
        await relay.first.until(lambda load: load.num_leases == 2)
        started = time.monotonic()
        progress = await relay.first.drain(deadline_s=0.5)
        assert 0.5 <= time.monotonic() - started < 0.5 + SLACK_S
        assert progress[0].num_leases == 2
        assert progress[-1] == DrainProgress(done=True)
        last = await silent.read()
        assert isinstance(last, HolderMessage)
        assert last.failure.kind == Failure.KIND_UNAVAILABLE
        assert await silent.read() is grpc.aio.EOF
    relay.decode.set_faults("")
    (await begun).check_equal(expected["300"])  # by the other one
    await relay.first.check_settled()
    await relay.first.restart()


async def test_again_and_again_another_process_at_the_same_address(
    relay: Relay, expected: Expected
) -> None:
    for turn in range(2):
        before = PrefillCandidate(relay.first.address, (await relay.first.load()).incarnation)
        relay.first.send(signal.SIGKILL)
        await relay.first.died()
        if turn == 1:
            await check_back_off(relay)
        await relay.first.restart()
        told = await relay.ask(PROMPTS["250"], PARAMS, salt=f"at once {turn}")
        told.check_equal(expected["250"])
        await relay.ask(PROMPTS["33"], PARAMS, relay.first, salt=f"it alone {turn}")
        with failing(relay) as reasons:
            await relay.ask(PROMPTS["33"], PARAMS, before, salt=f"before {turn}")
        assert "another incarnation" in reasons[0]
        now = (await relay.first.load()).incarnation
        links = {link.peer_incarnation for link in (await relay.decode.load()).links}
        assert now in links
        assert before.incarnation not in links


@ANY_CONNECTOR
async def test_who_may_ask_nobody_else_waits_for_a_worker_that_is_started_again(
    relay: Relay, expected: Expected
) -> None:
    relay.first.send(signal.SIGKILL)
    await relay.first.died()
    asked = asyncio.ensure_future(
        relay.ask(PROMPTS["250"], PARAMS, relay.first, salt="patient", timeout_s=RESTARTED_S)
    )
    await relay.decode.until(lambda load: load.num_fetching == 1)
    await relay.first.restart()
    serves = time.monotonic()
    (await asked).check_equal(expected["250"])
    assert time.monotonic() - serves < SLACK_S < RESTARTED_S


async def test_the_only_one_is_asked_once_more_when_it_is_lost_in_the_middle(
    relay: Relay, expected: Expected
) -> None:
    relay.first.set_faults("holder.chunk:2=kill")
    asked = asyncio.ensure_future(
        relay.ask(PROMPTS["300"], PARAMS, relay.first, salt="lost", timeout_s=RESTARTED_S)
    )
    await relay.first.died()
    await relay.first.restart()
    (await asked).check_equal(expected["300"])


def _kind(message: object) -> Failure.Kind.ValueType:
    assert isinstance(message, HolderMessage)
    return message.failure.kind


@contextmanager
def failing(relay: Relay) -> Iterator[list[str]]:
    """Whoever asks last is told that nobody could serve it; then the list has why, by the log."""
    said_before = relay.decode.log.stat().st_size
    reasons: list[str] = []
    with pytest.raises(UnavailableError, match=f"{NOBODY}$"):
        yield reasons
    said = relay.decode.log.read_bytes()[said_before:].decode()
    reasons += [line for line in said.splitlines() if NOBODY in line]


async def check_back_off(relay: Relay) -> None:
    """Nobody is there; that is not tried for every request."""

    async def ask() -> None:
        with pytest.raises(UnavailableError):
            await relay.ask(PROMPTS["33"], PARAMS, relay.first, timeout_s=1.0)

    with failing(relay) as reasons:
        await asyncio.gather(*(ask() for _ in range(19)))
        await relay.ask(PROMPTS["33"], PARAMS, relay.first, timeout_s=1.0)
    assert sum("was tried just now" in reason for reason in reasons) >= 10


async def test_a_lease_that_was_released_early_shows_not_one_token_or_name(relay: Relay) -> None:
    before, shown = await names(relay.decode), Answer()
    relay.first.set_faults("holder.commit=release")
    with failing(relay) as reasons:
        await relay.ask(PROMPTS["300"], PARAMS, relay.first, salt="early", shown=shown)
    assert "let go too early" in reasons[0]
    await relay.decode.check_settled()
    assert shown == Answer()
    assert await names(relay.decode) <= before


@pytest.mark.parametrize("point", POINTS[1:])
async def test_an_error_is_another_ones_turn(relay: Relay, expected: Expected, point: str) -> None:
    steps = (await relay.second.load()).num_steps
    relay.first.set_faults(f"{point}=fail")
    told = await relay.ask(PROMPTS["300"], PARAMS, salt=f"fail {point}")
    told.check_equal(expected["300"])
    assert (await relay.second.load()).num_steps > steps


@pytest.mark.parametrize(
    ("action", "said"), [(DAMAGE, "arrived damaged"), (TWICE, "were announced")]
)
async def test_a_chunk_that_is_wrong_is_another_ones_turn(
    relay: Relay, expected: Expected, action: str, said: str
) -> None:
    """Its bytes are others than were announced, or it is announced a second time."""
    steps = (await relay.second.load()).num_steps
    relay.first.set_faults(f"holder.chunk:2={action}")
    told = await relay.ask(PROMPTS["300"], PARAMS, salt=action)
    told.check_equal(expected["300"])
    assert relay.decode.has_said(said)
    assert (await relay.second.load()).num_steps > steps


async def test_without_another_one_the_prompt_is_computed_here(
    relay: Relay, expected: Expected
) -> None:
    """It is asked, as no link to it is known yet, and dies before it has handed over all."""
    before = (await relay.first.load()).incarnation
    await relay.first.restart()
    await relay.decode.until_lost(before)
    relay.first.set_faults("holder.chunk:2=kill")
    told = await relay.ask(
        PROMPTS["300"], PARAMS, relay.first, local=LocalPrefill.AUTO, salt="here"
    )
    told.check_equal(expected["300"])
    await relay.first.died()
    await relay.first.restart()


@ANY_CONNECTOR
async def test_nobody_there_and_nobody_else(relay: Relay) -> None:
    address, relay.first.address = relay.first.address, "127.0.0.1:9"
    try:
        with pytest.raises(UnavailableError, match=f"{NOBODY}$"):
            await relay.ask(PROMPTS["33"], PARAMS, relay.first, salt="nobody", timeout_s=1.0)
    finally:
        relay.first.address = address


@ANY_CONNECTOR
async def test_a_stopped_stranger_does_not_hold_up_whoever_names_it(
    relay: Relay, expected: Expected
) -> None:
    """No link is there yet whose keepalive would notice. The last test: nobody links to that one
    for some seconds."""
    await relay.first.restart()
    relay.first.send(signal.SIGSTOP)
    await relay.first.stopped()
    started = time.monotonic()
    told = await relay.ask(PROMPTS["250"], PARAMS, salt="stranger")
    assert time.monotonic() - started < NOTICED_S + SLACK_S
    told.check_equal(expected["250"])
