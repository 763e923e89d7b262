"""What a decode worker has of a prompt is pulled from it by whoever computes the rest (fp32)."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from decode_worker.answerer import LocalPrefill, PrefixSource
from engine.engine import Engine
from engine.memory import bytes_needed
from engine.sampling import SamplingParams
from engine.step_times import StepTimes
from prefill_worker import prefixes
from prefill_worker.node import Node
from tests.decode_worker.worker_group import SlowSteps, WorkerGroup
from tests.engine.models_on_disk import CONFIGS, make_tiny
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.crossed("folder", "running")]

HOT = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
PROMPT = random_prompts(1, 150, 150, seed=150)[0]
STEP = 16  # tokens


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param)).folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return make_engine(str(folder))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pulls does not compute instead, however busy the machine is."""
    monkeypatch.setattr(prefixes, "GRACE_S", 60.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["inprocess", "socket"])
async def running(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[WorkerGroup]:
    engines = [make_engine(str(folder), max_num_batched_tokens=STEP) for _ in range(3)]
    group = await WorkerGroup.start(engines[:1], engines[1:], request.param)
    yield group
    await group.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def group(running: WorkerGroup) -> AsyncIterator[WorkerGroup]:
    await running.forget()
    yield running
    await running.check_idle()


async def ask(
    group: WorkerGroup,
    prompt: list[int],
    sources: tuple[PrefixSource, ...] = (),
    params: SamplingParams = HOT,
    computed_by: int = 0,
) -> Answer:
    at = [group.prefill[computed_by]]
    return await group.ask(prompt, params, sources, computed_by=at, local=LocalPrefill.NEVER)


def num_cached(told: Answer) -> int:
    assert told.prompt is not None
    return told.prompt.num_cached_tokens


def pulled(worker: Node) -> int:
    return worker.fetcher.num_prefix_tokens


async def test_a_conversation_moves_to_another_prefill_worker(
    group: WorkerGroup, alone: Engine
) -> None:
    """Of the first turn's 130 tokens all but the last are cached, in whole blocks."""
    decode, second = group.decode[0], group.prefill[1]
    params = replace(HOT, max_tokens=40)
    answered = await ask(group, PROMPT[:90], params=params)
    conversation = PROMPT[:90] + answered.tokens[0] + PROMPT[:30]
    before, steps = pulled(second), second.engine.engine.num_steps
    told = await ask(group, conversation, computed_by=1)
    told.check_equal(answer(alone, conversation, HOT))
    assert pulled(second) - before == num_cached(told) == 128
    assert second.engine.engine.num_steps - steps == 2, "32 tokens in chunks of 16"
    assert pulled(decode) == 0


@pytest.mark.parametrize(
    ("length", "there", "here", "cached", "if_dear"),
    [
        (150, 0, 0, 0, 0),
        (150, 0, 96, 96, 0),
        (150, 96, 0, 96, 96),
        (150, 64, 96, 96, 64),
        (150, 96, 64, 96, 96),
        (150, 96, 96, 96, 96),
        (64, 64, 0, 63, 63),
        (64, 64, 48, 63, 63),
        (64, 48, 64, 63, 63),  # needs nobody
        (64, 0, 48, 48, 0),
    ],
)
async def test_what_nobody_computed(
    group: WorkerGroup, alone: Engine, length: int, there: int, here: int, cached: int, if_dear: int
) -> None:
    """The prefill worker has `there`, the decode worker `here`; `if_dear`, a token that is
    pulled costs more than one that is computed."""
    prefill, expected = group.prefill[0], answer(alone, PROMPT[:length], HOT)
    for right in (cached, if_dear):
        await group.forget()
        for worker, warm in ((prefill, there), (group.decode[0], here)):
            if warm:
                await group.warm(worker, PROMPT[:warm])
        prefill.engine.engine.step_times = SlowSteps() if right == cached else StepTimes()
        steps = prefill.engine.engine.num_steps
        told = await ask(group, PROMPT[:length])
        prefill.engine.engine.step_times = SlowSteps()
        told.check_equal(expected)
        assert num_cached(told) == right
        computed = 0 if here == length else length - right
        assert prefill.engine.engine.num_steps - steps == -(-computed // STEP)


async def test_whoever_has_most_is_asked(group: WorkerGroup, alone: Engine) -> None:
    computing, other = group.prefill
    expected = answer(alone, PROMPT, HOT)
    for elsewhere in (64, 128):
        await group.forget()
        await group.warm(group.decode[0], PROMPT[:96])
        await group.warm(other, PROMPT[:elsewhere])
        before = pulled(computing)
        told = await ask(group, PROMPT, (group.has(other, elsewhere),))
        told.check_equal(expected)
        assert pulled(computing) - before == num_cached(told) == max(96, elsewhere)


async def test_what_is_said_of_itself_counts_no_more_than_what_it_has(
    group: WorkerGroup, alone: Engine
) -> None:
    decode = group.decode[0]
    await group.warm(decode, PROMPT[:64])
    told = await ask(group, PROMPT, (group.has(decode, 128),))
    told.check_equal(answer(alone, PROMPT, HOT))
    assert num_cached(told) == 64


async def test_prompt_logprobs_come_from_nobodys_cache(group: WorkerGroup, alone: Engine) -> None:
    params = replace(HOT, prompt_logprobs=1)
    await group.warm(group.decode[0], PROMPT[:96])
    told = await ask(group, PROMPT, params=params)
    told.check_equal(answer(alone, PROMPT, params))
    assert num_cached(told) == 0


async def test_the_load_report_counts_tokens(group: WorkerGroup) -> None:
    computing = group.prefill[0]
    before = await computing.reporter.load()
    await group.warm(group.decode[0], PROMPT[:96])
    await ask(group, PROMPT)
    await ask(group, PROMPT[:144])
    after = await computing.reporter.load()
    assert after.num_prefix_tokens - before.num_prefix_tokens == 96
    # the second prompt was cached where it is answered
    assert after.num_query_tokens - before.num_query_tokens == 150
    assert after.num_hit_tokens - before.num_hit_tokens == 0
    await group.decode[0].engine.ask(Engine.reset_prefix_cache)
    await ask(group, PROMPT[:144])
    again = await computing.reporter.load()
    assert again.num_query_tokens - after.num_query_tokens == 144
    assert again.num_hit_tokens - after.num_hit_tokens == 143
    assert again.num_prefix_tokens == after.num_prefix_tokens


async def test_full_pools_that_wait_for_each_other_all_finish(folder: Path, alone: Engine) -> None:
    """Each decode worker has room for one prompt and a little, waits for the prefill worker to
    compute it, and that one for the prefix from whom it is computed for."""
    knobs = {"max_model_len": 96, "max_num_batched_tokens": 32}
    layouts = alone.info.cache.layouts
    knobs["kv_cache_memory_bytes"] = int(1.5 * bytes_needed(layouts, 96, 32))
    small = [make_engine(str(folder), **knobs) for _ in range(3)]
    group = await WorkerGroup.start(small[:2], small[2:], "inprocess")
    prefixes = random_prompts(2, 64, 64, seed=9)
    for worker, prefix in zip(group.decode, prefixes, strict=True):
        await group.warm(worker, prefix)
    asks, expected = [], []
    for i in range(16):
        by = i % 2
        prompt = prefixes[by] + random_prompts(1, 5, 20, seed=i)[0]
        expected.append(answer(alone, prompt, HOT))
        asks.append(
            group.ask(prompt, HOT, (), by, group.prefill, LocalPrefill.NEVER),
        )
    for told, right in zip(await asyncio.gather(*asks), expected, strict=True):
        told.check_equal(right)
    await group.check_idle()
    assert pulled(group.prefill[0]) > 0
    await group.stop()


async def test_one_that_drains_hands_out_nothing(folder: Path, alone: Engine) -> None:
    engines = [make_engine(str(folder), max_num_batched_tokens=STEP) for _ in range(2)]
    group = await WorkerGroup.start(engines[:1], engines[1:], "inprocess")
    await group.warm(group.decode[0], PROMPT[:96])
    group.decode[0].begin_drain()
    told = await ask(group, PROMPT)
    told.check_equal(answer(alone, PROMPT, HOT))
    assert num_cached(told) == 0
    await group.check_idle()
    await group.stop()
