"""Reads that do not end: their blocks stay where they are until they do, and nothing else waits."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.metrics.meter import process_page
from cluster.metrics.worker import worker_collectors
from decode_worker.answerer import LocalPrefill
from engine.engine import Engine
from engine.errors import UnavailableError
from engine.sampling import SamplingParams
from kv_transfer import holder
from kv_transfer.registry import open_connector
from prefill_worker import node
from prefill_worker.fetching import FetchEnd
from protos.events_pb2 import LoadReport
from tests.cluster.metrics.samples import Samples, read, value
from tests.decode_worker.held_up import HeldUp
from tests.decode_worker.worker_pair import WorkerPair
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer

PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
PROMPT, OTHER = random_prompts(2, 150, 150, seed=9)
BLOCKS = 10  # of a prompt
POOL = {"kv_cache_memory_bytes": 34 * 16 * 4 * 128}  # room for three prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model")).folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Answer]:
    engine = make_engine(str(folder))
    return [answer(engine, prompt, PARAMS) for prompt in (PROMPT, OTHER)]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> HeldUp:
    gate = HeldUp(open_connector)
    monkeypatch.setattr(node, "open_connector", gate.open)
    return gate


@pytest_asyncio.fixture
async def pair(folder: Path, gate: HeldUp) -> AsyncIterator[WorkerPair]:
    """Linked already, so that what a test holds up is a prompt's."""
    prefill, decode = (make_engine(str(folder), **POOL) for _ in range(2))
    pair = await WorkerPair.start(prefill, decode, ("inprocess",))
    await pair.ask(PROMPT[:20], PARAMS)
    await pair.forget(pair.prefill, pair.decode)
    yield pair
    await gate.finish()
    await pair.stop()


async def load(pair: WorkerPair) -> LoadReport:
    return await pair.decode.reporter.load()


def page_of(pair: WorkerPair) -> Samples:
    return read(process_page({}, worker_collectors(pair.decode)).render())


async def quarantined(pair: WorkerPair, count: int) -> LoadReport:
    async with asyncio.timeout(30):
        while (report := await load(pair)).blocks[0].quarantined != count:
            await asyncio.sleep(0.005)
    return report


async def abort(pair: WorkerPair, gate: HeldUp, prompt: list[int]) -> None:
    """Once some of its blocks are being read."""
    asked = asyncio.ensure_future(pair.ask(prompt, PARAMS))
    async with asyncio.timeout(30):
        while sum(not read.given_up for read in gate.reads) < 3:  # chunks of 64 tokens
            await asyncio.sleep(0.005)
    asked.cancel()
    await asyncio.wait({asked})


async def test_the_blocks_of_an_aborted_request_come_back_with_its_reads(
    pair: WorkerPair, gate: HeldUp, expected: list[Answer]
) -> None:
    free = (await load(pair)).blocks[0].free
    gate.holding = True
    await abort(pair, gate, PROMPT)
    report = await quarantined(pair, BLOCKS)
    assert report.transfer.num_quarantined_reads == len(gate.reads) == 3
    assert report.blocks[0].free <= free - BLOCKS
    assert report.num_fetching == 0
    page = page_of(pair)
    assert value(page, "kv_cache_blocks", group="0", state="quarantined") == BLOCKS
    assert value(page, "handoffs_total", connector="inprocess", end="cancelled") == 1
    assert value(page, "fetches_total", outcome="cancelled") == 1

    late, gate.reads, gate.holding = gate.reads, [], False
    for _ in range(4):  # more than there is room for: all other blocks are used again
        told = await asyncio.gather(*(pair.ask(p, PARAMS) for p in (PROMPT, OTHER)))
        for mine, right in zip(told, expected, strict=True):
            mine.check_equal(right)
        await pair.forget(pair.decode)
    await pair.decode.engine.ask(Engine.check_integrity)
    await quarantined(pair, BLOCKS)

    for number, one in enumerate(late, 1):
        await one.finish()
        async with asyncio.timeout(30):
            while (await load(pair)).transfer.num_quarantined_reads != len(late) - number:
                await asyncio.sleep(0.005)
    assert (await quarantined(pair, 0)).blocks[0].free == free
    await pair.check_idle()


async def test_beyond_its_bound_the_worker_is_unhealthy(pair: WorkerPair, gate: HeldUp) -> None:
    """A quarter of all blocks, by default."""
    gate.holding = True
    await abort(pair, gate, PROMPT)
    await quarantined(pair, BLOCKS)
    health = await pair.decode.check_health(check_integrity=True)
    assert not health.healthy
    assert health.reason == "10 blocks are in quarantine, at most 8 may be"
    assert (await load(pair)).unhealthy == health.reason
    await gate.finish()
    await quarantined(pair, 0)
    assert (await pair.decode.check_health(check_integrity=True)).healthy
    await pair.check_idle()


@pytest.mark.parametrize("local", [LocalPrefill.AUTO, LocalPrefill.NEVER])
async def test_the_request_is_answered_by_other_blocks(
    pair: WorkerPair,
    gate: HeldUp,
    expected: list[Answer],
    local: LocalPrefill,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The holder does not wait for ever; the prompt is computed here, or fetched once more."""
    monkeypatch.setattr(holder, "COMMIT_TIMEOUT_S", 0.2)
    if local is LocalPrefill.NEVER:
        pair.addresses *= 2
    link = pair.decode.exchange.links.known(pair.addresses[0])
    assert link
    link.load = None  # so that nobody can tell whether computing it here were sooner
    gate.holding = True
    asked = asyncio.ensure_future(pair.ask(PROMPT, PARAMS, local))
    async with asyncio.timeout(30):
        while len(gate.reads) < 3:
            await asyncio.sleep(0.005)
    gate.holding = False
    (await asked).check_equal(expected[0])
    report = await quarantined(pair, BLOCKS)
    assert report.transfer.num_quarantined_reads == 3
    outcome = FetchEnd.COMPUTED_HERE if local is LocalPrefill.AUTO else FetchEnd.FETCHED_AGAIN
    page = page_of(pair)
    assert value(page, "fetches_total", outcome=outcome) == 1
    assert value(page, "handoffs_total", connector="inprocess", end="failed") == 1
    await gate.finish()
    await quarantined(pair, 0)
    await pair.check_idle()


async def test_with_nobody_else_the_request_fails_and_says_why(
    pair: WorkerPair,
    gate: HeldUp,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(holder, "COMMIT_TIMEOUT_S", 0.2)
    gate.holding = True
    with pytest.raises(UnavailableError, match="^no prefill worker could serve$"):
        await pair.ask(PROMPT, PARAMS)
    assert "could serve: 127.0.0.1:" in caplog.text
    assert "did not come within" in caplog.text
    await quarantined(pair, BLOCKS)
    assert value(page_of(pair), "fetches_total", outcome="failed") == 1
    await gate.finish()
    await quarantined(pair, 0)
    await pair.check_idle()
