"""Prefill workers that have as many hand-offs as they may, and a decode worker that computes no
prompts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from decode_worker.answerer import LocalPrefill
from engine.errors import QueueFullError
from engine.request import ChoiceSoFar
from engine.sampling import SamplingParams
from prefill_worker.node import Node
from tests.decode_worker.worker_group import WorkerGroup
from tests.engine.held import held
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.waiting import until

FILLING, PROMPT = random_prompts(2, 40, 40, seed=7)
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
REFUSED = "1 hand-offs are under way already"


@pytest_asyncio.fixture
async def group(tmp_path: Path) -> AsyncIterator[WorkerGroup]:
    """Two prefill workers, each of which serves one hand-off at a time."""
    folder = str(make_tiny("llama", tmp_path).folder)
    prefill = [make_engine(folder) for _ in range(2)]
    group = await WorkerGroup.start([make_engine(folder)], prefill, "inprocess", max_leases=1)
    yield group
    await group.check_idle()
    await group.stop()


async def ask(
    group: WorkerGroup, prompt: list[int], workers: list[Node], sent: list[int] | None = None
) -> Answer:
    so_far = () if sent is None else (ChoiceSoFar(sent),)
    return await group.ask(
        prompt, PARAMS, computed_by=workers, local=LocalPrefill.NEVER, sent=so_far
    )


@asynccontextmanager
async def full(group: WorkerGroup, *workers: Node) -> AsyncIterator[None]:
    """Each is in the middle of a hand-off, until this is left."""
    filling: list[asyncio.Task[Answer]] = []
    with ExitStack() as engines:
        for worker in workers:
            engines.enter_context(held(worker.engine))
            filling.append(asyncio.ensure_future(ask(group, FILLING, [worker])))
        await until(lambda: all(worker.num_leases for worker in workers))
        yield
    await asyncio.gather(*filling)


async def test_a_new_request_goes_where_there_is_room_or_is_told_to_come_again(
    group: WorkerGroup,
) -> None:
    right = await ask(group, PROMPT, group.prefill)
    await group.check_idle()
    await group.forget()
    async with full(group, group.prefill[0]):
        (await ask(group, PROMPT, group.prefill)).check_equal(right)
        with pytest.raises(QueueFullError, match="^every prefill worker is busy$"):
            await ask(group, PROMPT[::-1], group.prefill[:1])


async def test_an_answer_that_has_begun_waits_for_room(
    group: WorkerGroup, caplog: pytest.LogCaptureFixture
) -> None:
    whole = (await ask(group, PROMPT, group.prefill)).tokens[0]
    await group.check_idle()
    await group.forget()
    async with full(group, *group.prefill):
        moved = asyncio.ensure_future(ask(group, PROMPT, group.prefill, whole[:3]))
        await until(lambda: caplog.text.count(REFUSED) == 2)
        await asyncio.sleep(0)
        assert not moved.done()
    assert (await moved).tokens[0] == whole[3:]
    assert caplog.text.count(REFUSED) == 2, "it is said once"
