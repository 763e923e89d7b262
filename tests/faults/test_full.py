"""More requests than there is room for, here, there or at both ends: all wait and finish."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from decode_worker.answerer import LocalPrefill, PrefixSource
from kv_transfer.config import ExchangeConfig
from tests.cluster.metrics.samples import value
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer
from tests.faults.conftest import PARAMS, PROMPTS
from tests.faults.workers import ENGINE, Relay, Worker, leased

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOB_BYTES = 8192  # 2 layers, 2 heads, K and V, 16 tokens, 16 floats
PROMPT_BLOCKS = 19
SMALL = 45 * BLOB_BYTES  # room for two of the longest prompts
LARGE = 1000 * BLOB_BYTES
PATIENT_S = 2.5  # longer than a silent holder is waited for
LONG_S = 10.0  # longer than messages may take
PAUSE_S = 0.15  # for the others on a core
CONNECTORS = ["nixl", "socket"]
SHORT = {name: PROMPTS[name] for name in ("33", "100")}
TAILS = random_prompts(16, 20, 60, seed=3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def all_relays(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Relay]]:
    """Two decode workers for each connector over the same two prefill workers; the first of
    either is small."""
    folder = tmp_path_factory.mktemp("workers")

    def worker(role: str, connector: str, size: int) -> Worker:
        num_seqs = 8 if role == "prefill" else 64
        return Worker(
            folder,
            model,
            role,
            connector,
            stuck_after_s=ExchangeConfig().stuck_after_s,
            kv_cache_memory_bytes=size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs,
        )

    narrow, wide = (worker("prefill", "auto", size) for size in (SMALL, LARGE))
    relays = {
        f"{name} {connector}": Relay(narrow, wide, worker("decode", connector, size))
        for connector in CONNECTORS
        for name, size in (("narrow", SMALL), ("wide", LARGE))
    }
    workers = [narrow, wide, *(relay.decode for relay in relays.values())]
    await asyncio.gather(*(one.start() for one in workers))
    for relay in relays.values():
        await relay.connect()
    yield relays
    for relay in relays.values():
        await relay.session.stop()
    await asyncio.gather(*(one.end() for one in workers))


@pytest_asyncio.fixture(loop_scope="module", params=CONNECTORS)
async def relays(
    request: pytest.FixtureRequest, all_relays: dict[str, Relay], expected: dict[str, Answer]
) -> AsyncIterator[dict[str, Relay]]:
    """Those of one connector, by the decode worker's size. After every test nothing is left of
    it, and twenty requests succeed."""
    relays = {size: all_relays[f"{size} {request.param}"] for size in ("narrow", "wide")}
    yield relays
    for relay in relays.values():
        await relay.check_well(SHORT, expected, PARAMS)


def check_answers(told: list[Answer], names: list[str], expected: dict[str, Answer]) -> None:
    for one, name in zip(told, names, strict=True):
        one.check_equal(expected[name])


@pytest.mark.parametrize(
    ("decode", "prefill"), [("narrow", "wide"), ("wide", "narrow"), ("narrow", "narrow")]
)
async def test_everybody_waits_and_finishes(
    relays: dict[str, Relay], expected: dict[str, Answer], decode: str, prefill: str
) -> None:
    relay = relays[decode]
    worker = relay.first if prefill == "narrow" else relay.second
    names = ["300", "250", "100", "300"] * 5
    worker.set_faults("source.open=slow")  # until they have been seen to wait
    asked = [
        relay.ask(PROMPTS[name], PARAMS, worker, salt=f"{decode} {prefill} {i}")
        for i, name in enumerate(names)
    ]
    told = asyncio.gather(*asked)
    crowded = relay.decode if decode == "narrow" else worker
    await crowded.until(lambda load: load.num_waiting > 4)
    worker.set_faults("")
    check_answers(await told, names, expected)


async def test_full_workers_that_pull_from_each_other_all_finish(
    relays: dict[str, Relay], model: Path
) -> None:
    """Each waits for blocks that the other fills, from prompts whose beginnings either one has: or
    had, as full caches keep none for long. So it is tried until something was pulled."""
    computing = relays["narrow"].first
    before = (await computing.load()).num_prefix_tokens
    for attempt in range(10):
        await pull_from_each_other(relays, model, f"ring {attempt} {relays['wide'].decode.address}")
        num_pulled = (await computing.load()).num_prefix_tokens
        assert value(await computing.metrics(), "prefix_tokens_pulled_total") == num_pulled
        if num_pulled > before:
            return
    raise AssertionError("nothing was pulled")


async def pull_from_each_other(relays: dict[str, Relay], model: Path, salt: str) -> None:
    relay, other = relays["narrow"], relays["wide"]
    computing, decode = relay.first, relay.decode
    engine = make_engine(str(model), **ENGINE)
    beginnings = {computing: PROMPTS["300"][:240], decode: PROMPTS["250"][:240]}
    await relay.ask(beginnings[decode], PARAMS, local=LocalPrefill.ALWAYS, salt=salt)
    async with leased(computing, beginnings[computing], PARAMS, salt):
        pass
    loads = {one: await one.load() for one in beginnings}
    computing.set_faults("source.open=slow")
    prompts, asked = [], []
    for i, tail in enumerate(TAILS):
        owner = decode if i % 2 else computing
        source = PrefixSource(owner.address, loads[owner].incarnation, 240)
        prompts.append(beginnings[owner] + tail)
        by = other if i % 4 > 1 else relay
        asked.append(by.ask(prompts[-1], PARAMS, computing, salt=salt, sources=[source]))
    told = asyncio.gather(*asked)
    await asyncio.gather(*(one.until(lambda load: load.num_waiting > 1) for one in beginnings))
    computing.set_faults("")
    for answered, prompt in zip(await told, prompts, strict=True):
        answered.check_equal(answer(engine, prompt, PARAMS))


async def test_a_prefill_worker_whose_blocks_are_all_leased_waits_too(
    relays: dict[str, Relay], expected: dict[str, Answer]
) -> None:
    relay = relays["wide"]
    worker = relay.first
    names = ["300", "250"] * 4
    async with AsyncExitStack() as leases:
        for number in range(2):
            await leases.enter_async_context(
                leased(worker, PROMPTS["300"], PARAMS, f"lease {number}")
            )
        asked = [
            asyncio.ensure_future(relay.ask(PROMPTS[n], PARAMS, worker, salt=f"behind {i}"))
            for i, n in enumerate(names)
        ]
        load = await worker.until(lambda load: load.num_waiting == len(names))
        assert load.blocks[0].held >= load.blocks[0].reserved >= 2 * PROMPT_BLOCKS
        done, _ = await asyncio.wait(asked, timeout=PATIENT_S, return_when=asyncio.FIRST_COMPLETED)
        assert not done, await asyncio.gather(*done)
        report = await worker.health()
        assert report.healthy, report.reason
        assert (await worker.load()).num_steps == load.num_steps
    check_answers(await asyncio.gather(*asked), names, expected)


async def test_a_long_queue_times_nobody_out(
    request: pytest.FixtureRequest, relays: dict[str, Relay], expected: dict[str, Answer]
) -> None:
    """A prefill worker whose steps are slow, beside a decode worker with enough to do."""
    relay = relays["wide"]
    names, salt = ["300", "250"] * 16, request.node.name
    over = asyncio.Event()
    busy = [asyncio.ensure_future(answer_without_end(relay, expected, over)) for _ in range(2)]
    worker = relay.second
    worker.set_faults("source.open=slow")
    steps = (await worker.load()).num_steps
    began = time.monotonic()
    told = await asyncio.gather(
        *(relay.ask(PROMPTS[n], PARAMS, worker, salt=f"{salt} {i}") for i, n in enumerate(names))
    )
    assert time.monotonic() - began > LONG_S
    assert (await worker.load()).num_steps - steps > 1000, "it is slow, and never stands still"
    worker.set_faults("")
    check_answers(told, names, expected)
    over.set()
    assert min(await asyncio.gather(*busy)) > 10


async def answer_without_end(relay: Relay, expected: dict[str, Answer], over: asyncio.Event) -> int:
    """Prompts that are computed where they are answered."""
    num_answered = 0
    while not over.is_set():
        told = await relay.ask(PROMPTS["33"], PARAMS, local=LocalPrefill.ALWAYS)
        told.check_equal(expected["33"])
        num_answered += 1
        await asyncio.sleep(PAUSE_S)
    return num_answered
