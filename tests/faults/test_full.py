"""More requests than there is room for, here, there or at both ends: all wait and finish."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from decode_worker.answerer import LocalPrefill
from tests.engine.pair import Answer
from tests.faults.conftest import PARAMS, PROMPTS
from tests.faults.workers import Relay, Worker, leased

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOB_BYTES = 8192  # 2 layers, 2 heads, K and V, 16 tokens, 16 floats
PROMPT_BLOCKS = 19
SMALL = 45 * BLOB_BYTES  # room for two of the longest prompts
LARGE = 1000 * BLOB_BYTES
PATIENT_S = 2.5  # longer than a silent holder is waited for
HELD_UP_S = 12.0  # longer than messages may take


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relays(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Relay]]:
    """Two decode workers over the same two prefill workers; the first of either is small."""
    folder = tmp_path_factory.mktemp("workers")
    narrow_p, wide_p, narrow_d, wide_d = (
        Worker(
            folder,
            model,
            role,
            "socket",
            stuck_after_s=20.0,  # one of them is slow on purpose
            kv_cache_memory_bytes=size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs,
        )
        for role, num_seqs in (("prefill", 8), ("decode", 64))
        for size in (SMALL, LARGE)
    )
    narrow, wide = Relay(narrow_p, wide_p, narrow_d), Relay(narrow_p, wide_p, wide_d)
    await asyncio.gather(narrow.start(), wide_d.start())
    await wide.connect()
    yield {"narrow": narrow, "wide": wide}
    await wide.session.stop()
    await narrow.end()
    await wide_d.end()


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
    names = ["300", "250", "100", "300"] * 8
    asked = [
        relay.ask(PROMPTS[name], PARAMS, worker, salt=f"{decode} {prefill} {i}")
        for i, name in enumerate(names)
    ]
    told = asyncio.gather(*asked)
    crowded = relay.decode if decode == "narrow" else worker
    await crowded.until(lambda load: load.num_waiting > 4)
    check_answers(await told, names, expected)
    for one in relay.workers:
        await one.check_settled()


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
        assert load.blocks[0].held >= 2 * PROMPT_BLOCKS
        done, _ = await asyncio.wait(asked, timeout=PATIENT_S, return_when=asyncio.FIRST_COMPLETED)
        assert not done, await asyncio.gather(*done)
        report = await worker.health()
        assert report.healthy, report.reason
        assert (await worker.load()).num_steps == load.num_steps
    check_answers(await asyncio.gather(*asked), names, expected)
    for one in relay.workers:
        await one.check_settled()


async def test_a_long_queue_times_nobody_out(
    relays: dict[str, Relay], expected: dict[str, Answer]
) -> None:
    """A prefill worker whose engine is held up, beside a decode worker with enough to do."""
    relay = relays["wide"]
    names = ["300", "250"] * 16
    over = asyncio.Event()
    busy = [asyncio.ensure_future(answer_without_end(relay, expected, over)) for _ in range(4)]
    relay.first.set_faults("source.open=stuck")
    asked = [
        relay.ask(PROMPTS[n], PARAMS, relay.first, salt=f"long {i}") for i, n in enumerate(names)
    ]
    told = asyncio.gather(*asked)
    done, _ = await asyncio.wait({told}, timeout=HELD_UP_S)
    assert not done
    relay.first.set_faults("")
    check_answers(await told, names, expected)
    over.set()
    assert min(await asyncio.gather(*busy)) > 10
    for one in relay.workers:
        await one.check_settled()


async def answer_without_end(relay: Relay, expected: dict[str, Answer], over: asyncio.Event) -> int:
    """Prompts that are computed where they are answered."""
    num_answered = 0
    while not over.is_set():
        told = await relay.ask(PROMPTS["33"], PARAMS, local=LocalPrefill.ALWAYS)
        told.check_equal(expected["33"])
        num_answered += 1
    return num_answered
