"""Workers of either pool die, stop and hang under a dozen streams, and no request notices."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import httpx
import pytest
import pytest_asyncio

from cluster.relay import Relay, RelayConfig
from decode_worker.answerer import LocalPrefill
from engine.engine import Engine
from engine.sampling import SamplingParams
from router.worker_index import Outcome
from router.workers import Leg
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer
from tests.faults.cached import is_held, snapshot
from tests.faults.fleet import ANSWERED_S, Fleet, Job, Wave, undisturbed, until
from tests.faults.garbled_events import FAULTS, GarblingPlane
from tests.faults.http_front import http_front
from tests.faults.workers import ENGINE, NOTICED_HERE_S, NOTICED_S, SLACK_S, Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

Expected = dict[str, Answer]
NUM_TOKENS = 160
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
STRICT = RelayConfig(LocalPrefill.NEVER)
STALL_S = 1.0
WAIT_S = 60.0  # for others to come
REPAIRED_S = 10.0  # with the pauses between one snapshot and the next
SCORED = SamplingParams(max_tokens=1, prompt_logprobs=0)
BF16 = 0.5  # of a logprob; one token too few, and most are off by more


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        seed=seed,
        presence_penalty=0.5,
        n=1 + seed % 2,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=2,
    )


JOBS = {
    str(number): Job(prompt, GREEDY if number < 6 else seeded(number))
    for number, prompt in enumerate(random_prompts(12, 40, 250, seed=6))
}


TWENTY = {
    f"short {number}": Job(prompt, replace(GREEDY, max_tokens=6))
    for number, prompt in enumerate(random_prompts(20, 10, 100, seed=7))
}


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    return undisturbed(make_engine(str(model), **ENGINE), JOBS | TWENTY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet_of_module(model: Path, folder: Path) -> AsyncIterator[Fleet]:
    """Of the prefill workers the first one is read from by nixl, the other by sockets."""
    prefill = [Worker(folder, model, "prefill", connector) for connector in ("auto", "socket")]
    decode = [Worker(folder, model, "decode", "auto") for _ in range(2)]
    fleet = Fleet(prefill, decode)
    await fleet.start()
    yield fleet
    await fleet.end()


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(fleet_of_module: Fleet, expected: Expected) -> AsyncIterator[Fleet]:
    """After every test nothing is left of it at any worker that lives, and they answer twenty
    requests."""
    yield fleet_of_module
    for worker in fleet_of_module.living:
        worker.go_on()
    await fleet_of_module.check_settled()
    async with fleet_of_module.ingress() as relay:
        await Wave(relay, TWENTY).check(expected)
    await fleet_of_module.check_settled()


@pytest.mark.parametrize("leg", Leg)
async def test_stopped(fleet: Fleet, expected: Expected, leg: Leg) -> None:
    async with fleet.ingress(STRICT) as relay:
        wave = Wave(relay, JOBS)
        await wave.reach(20)
        victim = fleet.busiest(relay) if leg is Leg.DECODE else fleet.prefill[0]
        victim.send(signal.SIGSTOP)
        await victim.stopped()
        later = Wave(relay, JOBS)
        began = time.monotonic()
        await until(lambda: fleet.known(victim) not in relay.pools.usable(leg), NOTICED_HERE_S)
        await later.reach(1)
        assert time.monotonic() - began < NOTICED_S + SLACK_S
        await wave.check(expected)
        await later.check(expected)
        assert relay.reroutes.keys() == ({"died"} if leg is Leg.DECODE else set())


@pytest.mark.parametrize("leg", Leg)
async def test_stuck_behind_a_loop_that_answers(fleet: Fleet, expected: Expected, leg: Leg) -> None:
    """Before its engine has said that it has anything to do."""
    async with fleet.ingress(RelayConfig(LocalPrefill.NEVER, stall_s=STALL_S)) as relay:
        victim = fleet.pools[leg][0]
        victim.set_faults("source.open=stuck worker.reserved=stuck")
        async with asyncio.timeout(ANSWERED_S):
            while (await victim.health()).healthy:  # the router may send all to the other
                began = time.monotonic()
                wave = Wave(relay, JOBS)
                await wave.reach(1)
                assert time.monotonic() - began < STALL_S + SLACK_S
                await wave.check(expected)
        assert relay.reroutes.keys() == ({"stuck"} if leg is Leg.DECODE else set())


async def test_stuck_under_load(fleet: Fleet, expected: Expected) -> None:
    """The streams that have begun there go on elsewhere, with the next dozen."""
    async with fleet.ingress(RelayConfig(LocalPrefill.NEVER, stall_s=STALL_S)) as relay:
        wave = Wave(relay, JOBS)
        await wave.reach(20)
        fleet.decode[1].set_faults("worker.reserved=stuck")
        later = Wave(relay, JOBS)
        await wave.check(expected)
        await later.check(expected)
        assert relay.reroutes.keys() == {"stuck"}
        assert wave.longest_pause_s < STALL_S + SLACK_S
        assert not (await fleet.decode[1].health()).healthy, "it has been stuck all the time"


async def test_events_cut_swapped_doubled_lost_and_changed(
    fleet: Fleet, expected: Expected
) -> None:
    """A router's index is in the end what each worker holds, and no answer depends on it."""
    plane = GarblingPlane()
    garblers = plane.garblers
    async with fleet.ingress(STRICT, plane) as relay:
        while not all(garblers[one.address].is_done for one in fleet.living):
            await Wave(relay, JOBS).check(expected)
        links = [link for one in fleet.decode for link in (await one.load()).links]
        assert {link.connector for link in links} == {"nixl", "socket"}
        for worker in fleet.living:
            assert garblers[worker.address].counts == dict.fromkeys(FAULTS, 1)
            index, chains = relay.router.index.of(fleet.known(worker)), await snapshot(worker)
            await until(lambda: is_held(index, chains), REPAIRED_S)  # noqa: B023 - awaited here
            assert index.counts[Outcome.DUPLICATE] >= 1
            assert index.counts[Outcome.GAP] >= 2
            assert index.counts[Outcome.DIGEST] == 1


@pytest.mark.parametrize("local", [LocalPrefill.AUTO, LocalPrefill.NEVER])
async def test_clients_that_hang_up(fleet: Fleet, local: LocalPrefill) -> None:
    random = Random(local.value)
    async with fleet.ingress(RelayConfig(local)) as relay, http_front(relay) as client:
        for _ in range(2):
            turns = [random.expovariate(5.0) for _ in JOBS]
            await asyncio.gather(*map(lambda *one: hang_up(client, *one), JOBS.values(), turns))
            await until_nothing_is_left(fleet, relay)


async def hang_up(client: httpx.AsyncClient, job: Job, after_s: float) -> None:
    body = {"prompt": job.prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "n": 2}
    asked = asyncio.ensure_future(client.post("/v1/completions", json={**body, "stream": True}))
    await asyncio.wait({asked}, timeout=after_s)
    asked.cancel()
    await asyncio.wait({asked})


async def until_nothing_is_left(fleet: Fleet, relay: Relay) -> None:
    """Not of a block, a lease, nor an entry in the router's accounts."""
    async with asyncio.timeout(SLACK_S):
        for worker in fleet.living:
            while await worker.leftovers():
                await asyncio.sleep(0.01)
        await until(lambda: not relay.num_open, SLACK_S)
    assert relay.router.num_under_way == relay.router.num_waiting == 0


async def test_workers_of_other_weights_are_no_fellows(
    fleet: Fleet, folder: Path, tmp_path: Path
) -> None:
    """A decode worker without a prefill worker of its own weights computes prompts itself, and what
    it leaves when it dies waits for another one of them."""
    other = make_tiny("llama", tmp_path, max_position_embeddings=512, rope_theta=500.0).folder
    jobs = {name: job for name, job in JOBS.items() if job.params == GREEDY}
    expected = undisturbed(make_engine(str(other), **ENGINE), jobs)
    lonely = Worker(folder, other, "decode", "socket")
    mixed = Fleet([], [lonely])
    await mixed.start()
    strangers = fleet.living
    assert {worker in strangers for worker in fleet.prefill} == {True}
    num_steps = [(await worker.load()).num_steps for worker in strangers]
    try:
        async with mixed.ingress(RelayConfig(max_alone_s=WAIT_S)) as relay:
            mixed.meet(fleet)
            await Wave(relay, jobs).check(expected)
            assert not relay.pools.usable(Leg.PREFILL)
            wave = Wave(relay, jobs)
            await wave.reach(20)
            lonely.send(signal.SIGKILL)
            await lonely.died()
            await until(lambda: not relay.pools.usable(Leg.DECODE), NOTICED_HERE_S)
            await mixed.mend(Leg.DECODE)
            await wave.check(expected)
            assert relay.reroutes.keys() == {"died"}
    finally:
        await lonely.end()
    assert [(await worker.load()).num_steps for worker in strangers] == num_steps


async def test_a_decode_worker_that_is_killed(fleet: Fleet, expected: Expected) -> None:
    slow_down(fleet.decode)
    async with fleet.ingress(STRICT) as relay:
        wave = Wave(relay, JOBS)
        await wave.reach(20)
        fleet.busiest(relay).send(signal.SIGKILL)
        await wave.check(expected)
        assert relay.reroutes.keys() == {"died"}


async def test_prefill_workers_that_are_killed(fleet: Fleet, expected: Expected) -> None:
    """The first one in the middle of a hand-off, which the other takes over; without that one
    decode workers compute prompts."""
    first, second = fleet.prefill
    async with fleet.ingress(STRICT) as relay:
        first.set_faults("holder.chunk:9=kill")
        async with asyncio.timeout(ANSWERED_S):
            while first.child.returncode is None:  # the router may send most to the other
                await Wave(relay, JOBS).check(expected)
    async with fleet.ingress() as relay:
        wave = Wave(relay, JOBS)
        await wave.reach(1)
        later = Wave(relay, JOBS)
        second.send(signal.SIGKILL)
        await wave.check(expected)
        await later.check(expected)
        await second.died()
        await until(lambda: not relay.pools.usable(Leg.PREFILL), NOTICED_S + SLACK_S)
        await Wave(relay, JOBS).check(expected)


async def test_all_decode_workers_are_killed(fleet: Fleet, expected: Expected) -> None:
    """Who comes then is told so at once; who was there before waits for others to come."""
    await fleet.mend(Leg.DECODE)
    async with fleet.ingress(RelayConfig(max_alone_s=WAIT_S)) as relay, http_front(relay) as client:
        wave = Wave(relay, JOBS)
        await wave.reach(20)
        for worker in fleet.decode:
            worker.send(signal.SIGKILL)
        for worker in fleet.decode:
            await worker.died()
        await until(lambda: not relay.pools.usable(Leg.DECODE), NOTICED_HERE_S)
        body = {"prompt": JOBS["0"].prompt, "max_tokens": 1}
        began = time.monotonic()
        refused = await client.post("/v1/completions", json=body)
        assert time.monotonic() - began < SLACK_S < WAIT_S
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        assert "no decode worker answers" in refused.text
        await fleet.mend(Leg.DECODE)
        await wave.check(expected)
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_a_request_that_two_workers_died_of(fleet: Fleet, model: Path, folder: Path) -> None:
    third = fleet.add(Leg.DECODE, Worker(folder, model, "decode", "socket"))
    await asyncio.gather(fleet.mend(), third)
    slow_down(fleet.decode)
    body = {"prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True}
    async with fleet.ingress(STRICT) as relay, http_front(relay) as client:
        asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
        for _ in range(2):
            victim = await answering(fleet, relay)
            victim.send(signal.SIGKILL)
            await victim.died()
        refused = await asked
        (other,) = (one for one in fleet.decode if one in fleet.living)
        session = relay.pools.session_of(fleet.known(other))
        assert session is not None
        assert session.num_submitted == 0
    assert refused.status_code == 500
    (decision, _) = relay.router.decisions
    assert (
        f"2 workers died or got stuck under request {decision.request_id}"
        in refused.json()["error"]["message"]
    )


def slow_down(decode: Sequence[Worker]) -> None:
    """Until a test is over: an answer that a busy machine was done with before anybody looked is
    under way still. Only what is fetched is slow."""
    for worker in decode:
        worker.set_faults("worker.reserved=slow")


async def answering(fleet: Fleet, relay: Relay) -> Worker:
    """Who runs the only request."""
    async with asyncio.timeout(SLACK_S):
        while True:
            for worker in set(fleet.decode) & set(fleet.living):
                session = relay.pools.session_of(fleet.known(worker))
                if session and session.num_open and (await worker.load()).num_running:
                    return worker
            await asyncio.sleep(0.005)


async def test_a_bf16_stream_goes_on_where_it_was(model: Path, folder: Path) -> None:
    """Rounding may choose other tokens there, so what was said is scored as a whole: each token
    must be as likely after all before it as its worker said."""
    dtype = "bfloat16"
    fleet = Fleet([], [Worker(folder, model, "decode", "socket", dtype=dtype) for _ in range(2)])
    await fleet.start()
    try:
        async with fleet.ingress() as relay:
            wave = Wave(relay, JOBS)
            await wave.reach(20)
            fleet.busiest(relay).send(signal.SIGKILL)
            await wave.finished()
            assert relay.reroutes["died"] > 0
        await fleet.check_settled()
    finally:
        await fleet.end()
    engine = make_engine(str(model), **{**ENGINE, "dtype": dtype})
    for name, told in wave.answers.items():
        check_continuous(engine, JOBS[name], told)


def check_continuous(engine: Engine, job: Job, told: Answer) -> None:
    assert told.tokens.keys() == set(range(job.params.n))
    for choice, tokens in told.tokens.items():
        assert len(tokens) == NUM_TOKENS
        assert [one.token_id for one in told.logprobs[choice]] == tokens
        report = answer(engine, [*job.prompt, *tokens], SCORED).prompt
        assert report is not None
        assert report.logprobs is not None
        scored = [one.logprob for one in report.logprobs[len(job.prompt) :] if one is not None]
        assert [one.logprob for one in told.logprobs[choice]] == pytest.approx(scored, abs=BF16)
