"""A prompt's beginning pulled from whoever has it; token for token as one engine (fp32)."""

import asyncio
import random
import socket
from collections import Counter
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
from kv_transfer.probe import LinkFigures
from prefill_worker import prefixes
from prefill_worker.fetching import FetchEnd
from prefill_worker.node import Node
from prefill_worker.prefix_cost import FREE
from tests.decode_worker.worker_group import WorkerGroup
from tests.engine.held import held
from tests.engine.models_on_disk import CONFIGS, make_tiny
from tests.engine.pair import make_engine
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
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama")).folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return make_engine(str(folder))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pulls does not compute instead, however busy the machine is or was when a link was
    timed."""
    monkeypatch.setattr(prefixes, "GRACE_S", 60.0)
    monkeypatch.setattr(prefixes.PrefixPlanner, "_cost", lambda *_: FREE)


def engines(folder: Path, count: int) -> list[Engine]:
    return [make_engine(str(folder), max_num_batched_tokens=STEP) for _ in range(count)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["inprocess", "socket", "nixl"])
async def running(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[WorkerGroup]:
    group = await WorkerGroup.start(engines(folder, 2), engines(folder, 2), request.param)
    yield group
    await group.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def group(running: WorkerGroup) -> AsyncIterator[WorkerGroup]:
    await running.forget()
    yield running
    await running.check_idle()


def num_steps(worker: Node) -> int:
    return worker.engine.engine.num_steps


@pytest.mark.parametrize("length", [16, 96, 144])
async def test_a_decode_worker_pulls_and_computes_the_rest(
    group: WorkerGroup, alone: Engine, length: int
) -> None:
    here, there = group.decode
    expected = answer(alone, PROMPT, HOT)
    await group.warm(there, PROMPT[:length])
    steps = num_steps(here), num_steps(there)
    told = await group.ask(PROMPT, HOT, [group.has(there, length)])
    told.check_equal(expected)
    assert told.prompt is not None
    assert told.prompt.num_cached_tokens == length
    assert num_steps(here) - steps[0] == -(-(150 - length) // STEP) + 5
    assert num_steps(there) == steps[1]
    await group.ask(PROMPT, HOT, [group.has(there, length)])
    assert num_steps(there) == steps[1]


async def test_a_whole_prompt_is_pulled(group: WorkerGroup, alone: Engine) -> None:
    expected = answer(alone, PROMPT[:64], HOT)
    await group.warm(group.prefill[0], PROMPT[:64])
    steps = num_steps(group.decode[0])
    told = await group.ask(PROMPT[:64], HOT, [group.has(group.prefill[0], 64)])
    told.check_equal(expected)
    assert num_steps(group.decode[0]) - steps == 6, "the last token is computed again"


@pytest.mark.parametrize("cached", [0, 32])
async def test_choices_share_what_was_pulled(
    group: WorkerGroup, alone: Engine, cached: int
) -> None:
    params = replace(HOT, n=3, logprobs=1, presence_penalty=0.5)
    expected = answer(alone, PROMPT, params)
    await group.warm(group.decode[1], PROMPT[:96])
    if cached:
        await group.warm(group.decode[0], PROMPT[:cached])
    pulled = group.decode[0].fetcher.num_prefix_tokens
    (await group.ask(PROMPT, params, [group.has(group.decode[1], 96)])).check_equal(expected)
    assert group.decode[0].fetcher.num_prefix_tokens - pulled == 96 - cached


@pytest.mark.parametrize("from_decode", [True, False])
async def test_a_prefill_worker_pulls_and_hands_all_of_it_on(
    group: WorkerGroup, alone: Engine, from_decode: bool
) -> None:
    expected = answer(alone, PROMPT, HOT)
    computing = group.prefill[0]
    there = group.decode[1] if from_decode else group.prefill[1]
    await group.warm(there, PROMPT[:96])
    steps, pulled = num_steps(computing), computing.fetcher.num_prefix_tokens
    told = await group.ask(
        PROMPT,
        HOT,
        [group.has(there, 96)],
        computed_by=[computing],
        local=LocalPrefill.NEVER,
    )
    told.check_equal(expected)
    assert computing.fetcher.num_prefix_tokens - pulled == 96
    assert num_steps(computing) - steps == 4
    assert told.prompt is not None
    assert told.prompt.num_cached_tokens == 96


async def test_where_nobody_computes_for_it_a_decode_worker_pulls_too(
    group: WorkerGroup, alone: Engine
) -> None:
    await group.warm(group.prefill[1], PROMPT[:96])
    sources = [group.has(group.prefill[1], 96)]
    for local, computed_by in ((LocalPrefill.AUTO, ["127.0.0.1:1"]), (LocalPrefill.ALWAYS, [])):
        await group.decode[0].engine.ask(Engine.reset_prefix_cache)
        told = await group.ask(PROMPT, HOT, sources, computed_by=computed_by, local=local)
        told.check_equal(answer(alone, PROMPT, HOT))
        assert told.prompt is not None
        assert told.prompt.num_cached_tokens == 96


async def test_less_than_was_promised(group: WorkerGroup, alone: Engine) -> None:
    """Of a window what is seen from an earlier end was not asked for."""
    expected = answer(alone, PROMPT, HOT)
    for there in (group.decode[1], group.prefill[1]):
        await group.forget()
        await group.warm(there, PROMPT[:64])
        sources = [group.has(there, 96)]
        told = await group.ask(PROMPT, HOT, sources)
        told.check_equal(expected)
        assert told.prompt is not None
        has_windows = any(one.group.window for one in alone.info.cache.layouts)
        assert told.prompt.num_cached_tokens == (0 if has_windows else 64)
        await group.forget()
        told = await group.ask(PROMPT, HOT, sources, computed_by=group.prefill[:1])
        told.check_equal(expected)


async def test_sources_that_fail_cost_nothing_but_time(group: WorkerGroup, alone: Engine) -> None:
    expected = answer(alone, PROMPT, HOT)
    there = group.decode[1]
    good = group.has(there, 96)
    stale = PrefixSource(good.address, there.incarnation ^ 1, 128)
    dead = PrefixSource("127.0.0.1:1", 5, 128)
    empty = group.has(group.prefill[1], 128)
    for bad in (stale, dead, empty):
        for computed_by in ([], group.prefill[:1]):
            await group.forget()
            told = await group.ask(PROMPT, HOT, [bad], computed_by=computed_by)
            told.check_equal(expected)
    await group.forget()
    await group.warm(there, PROMPT[:96])
    bad_ones = [source._replace(num_tokens=96) for source in (stale, dead)]
    told = await group.ask(PROMPT, HOT, [*bad_ones, good])
    told.check_equal(expected)
    assert told.prompt is not None
    assert told.prompt.num_cached_tokens == 96, "the next in line has it"


async def test_a_source_that_cannot_be_reached_holds_up_one_prompt(
    group: WorkerGroup, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "GRACE_S", 0.05)
    expected = answer(alone, PROMPT, HOT)
    planner = group.decode[0].fetcher.prefixes
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = PrefixSource(f"127.0.0.1:{silent.getsockname()[1]}", 7, 32)
        (await group.ask(PROMPT, HOT, [source])).check_equal(expected)
        assert planner.plan([source], 150) is None
        await group.forget()
        again = source._replace(incarnation=8)  # may be another process, at any address
        assert planner.plan([source, again], 150) is not None


async def test_a_source_whose_time_is_over_is_not_asked(
    group: WorkerGroup, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = group.decode
    await group.warm(there, PROMPT[:96])
    planner = here.fetcher.prefixes
    plan = planner.plan([group.has(there, 96)], 150)
    assert plan is not None
    monkeypatch.setattr(planner, "plan", lambda *_: replace(plan, timeout_s=0.0))
    leases, before = there.exchange.holder.tally.num_leases, Counter(here.fetcher.ends)
    told = await group.ask(PROMPT, HOT, [group.has(there, 96)])
    told.check_equal(answer(alone, PROMPT, HOT))
    assert there.exchange.holder.tally.num_leases == leases
    assert here.fetcher.ends - before == Counter({FetchEnd.COMPUTED_HERE: 1})
    await group.forget()
    monkeypatch.undo()
    await group.warm(there, PROMPT[:96])
    told = await group.ask(PROMPT, HOT, [group.has(there, 96)])
    assert told.prompt is not None
    assert told.prompt.num_cached_tokens == 96, "it counts as one that can be reached"


async def test_what_becomes_of_a_prefix_is_counted_once(group: WorkerGroup) -> None:
    here, there = group.decode
    good, forgotten = group.has(there, 96), group.has(group.prefill[1], 96)
    gone = good._replace(incarnation=there.incarnation ^ 1)
    nobody = PrefixSource("127.0.0.1:1", 6, 96)  # another test asks 5, and it is left alone then
    failing = [([one], FetchEnd.COMPUTED_HERE) for one in (gone, nobody, forgotten)]
    for sources, outcome in [
        ([good], FetchEnd.DELIVERED),
        *failing,
        ([gone, good], FetchEnd.DELIVERED),
    ]:
        await group.forget()
        await group.warm(there, PROMPT[:96])
        before, pulled = Counter(here.fetcher.ends), here.fetcher.num_prefix_tokens
        await group.ask(PROMPT, HOT, sources)
        assert here.fetcher.ends - before == Counter({outcome: 1}), sources
        num_pulled = here.fetcher.num_prefix_tokens - pulled
        assert num_pulled == (96 if outcome == FetchEnd.DELIVERED else 0)


async def test_what_is_computed_sooner_is_not_pulled(
    group: WorkerGroup, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    here, there = group.decode
    await group.warm(there, PROMPT[:96])
    await here.exchange.links.get(group.addresses[there])
    slow, here.engine.engine.step_times = here.engine.engine.step_times, StepTimes()
    try:  # before its first step it seems to compute in no time
        told = await group.ask(PROMPT, HOT, [group.has(there, 96)])
    finally:
        here.engine.engine.step_times = slow
    told.check_equal(answer(alone, PROMPT, HOT))
    assert told.prompt is not None
    assert told.prompt.num_cached_tokens == 0


async def test_what_would_not_be_here_in_time_is_not_asked_for(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait while a prompt is computed."""
    monkeypatch.undo()
    group = await WorkerGroup.start(engines(llama, 2), [], "inprocess")
    here, there = group.decode
    link = await here.exchange.links.get(group.addresses[there])
    own_s = 96 * here.engine.engine.step_times.whole_prompt_token_s
    cache = link.description.format
    num_bytes = 96 // cache.block_size * sum(group.blob_bytes for group in cache.groups)
    planned = []
    for pulled_s in (own_s + 0.9, own_s + 1.1):
        link.figures = LinkFigures(0.0, num_bytes / pulled_s)
        plan = here.fetcher.prefixes.plan([group.has(there, 96)], 150, num_held_up=100)
        planned.append(plan is not None)
    assert planned == [True, False]
    await group.stop()


async def test_a_source_that_drains_or_does_not_answer_is_left(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "GRACE_S", 1.0)
    group = await WorkerGroup.start(engines(llama, 2), [], "inprocess")
    there, sources = group.decode[1], [group.has(group.decode[1], 96)]
    expected = answer(make_engine(str(llama)), PROMPT, HOT)
    with held(there.engine):
        told = await group.ask(PROMPT, HOT, sources)
    told.check_equal(expected)
    await group.check_idle()
    await group.forget()
    await group.warm(there, PROMPT[:96])
    there.begin_drain()
    told = await group.ask(PROMPT, HOT, sources)
    told.check_equal(expected)
    assert told.prompt is not None
    assert told.prompt.num_cached_tokens == 0
    await group.check_idle()
    await group.stop()


@pytest.mark.parametrize("point", ["puller.chunk", "puller.reading", "puller.commit"])
async def test_a_pull_that_breaks_off_is_computed(llama: Path, point: str) -> None:
    group = await WorkerGroup.start(engines(llama, 2), [], "socket", f"{point}=fail")
    expected = answer(make_engine(str(llama)), PROMPT, HOT)
    await group.warm(group.decode[1], PROMPT[:96])
    for cached in (0, 144):
        told = await group.ask(PROMPT, HOT, [group.has(group.decode[1], 96)])
        told.check_equal(expected)
        assert told.prompt is not None
        assert told.prompt.num_cached_tokens == cached
        await group.check_idle()
    await group.stop()


async def test_full_pools_that_pull_from_each_other_all_finish(folder: Path, alone: Engine) -> None:
    """Each worker has room for one long prompt and a little, and somebody else has its prefix."""
    knobs = {"max_model_len": 96, "max_num_batched_tokens": 32}
    layouts = alone.info.cache.layouts
    knobs["kv_cache_memory_bytes"] = int(1.5 * bytes_needed(layouts, 96, 32))
    small = [make_engine(str(folder), **knobs) for _ in range(4)]
    group = await WorkerGroup.start(small[:2], small[2:], "inprocess")
    prefixes = random_prompts(4, 64, 64, seed=9)
    for worker, prefix in zip(group.workers, prefixes, strict=True):
        await group.warm(worker, prefix)
    draw = random.Random(4)
    asks, expected = [], []
    for i in range(24):
        owner = draw.randrange(4)
        prompt = prefixes[owner] + random_prompts(1, 5, 20, seed=i)[0]
        expected.append(answer(alone, prompt, HOT))
        by, computing = i % 2, group.prefill[i // 2 % 2]
        route = [computing] if i % 3 else []
        sources = [group.has(group.workers[owner], 64)]
        asks.append(group.ask(prompt, HOT, sources, by, route))
    for told, right in zip(await asyncio.gather(*asks), expected, strict=True):
        told.check_equal(right)
    await group.check_idle()
    assert sum(worker.fetcher.num_prefix_tokens for worker in group.workers) > 0
    await group.stop()
