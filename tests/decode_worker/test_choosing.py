"""Whom a decode worker asks, of those whom a request names, and when it asks nobody."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from decode_worker.answerer import LocalPrefill
from engine.request import ChoiceSoFar
from engine.sampling import SamplingParams
from engine.step_times import StepTimes
from kv_transfer import links
from kv_transfer.errors import LinkLost
from kv_transfer.link import Link
from kv_transfer.puller import HandOff, Pulled
from prefill_worker import fetching
from prefill_worker.fetching import FetchEnd
from prefill_worker.node import Node
from tests.decode_worker.worker_group import WorkerGroup
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import make_engine
from tests.engine.test_exact import random_prompts

PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
PROMPTS = random_prompts(8, 100, 100, seed=2)


@pytest_asyncio.fixture
async def group(tmp_path: Path) -> AsyncIterator[WorkerGroup]:
    folder = str(make_tiny("llama", tmp_path).folder)
    group = await WorkerGroup.start(
        [make_engine(folder)], [make_engine(folder), make_engine(folder)], "inprocess"
    )
    yield group
    await group.check_idle()
    await group.stop()


def num_steps(group: WorkerGroup) -> list[int]:
    return [worker.engine.engine.num_steps for worker in group.prefill]


async def meet(group: WorkerGroup) -> None:
    """Every prefill worker has been asked, and has reported."""
    known = group.decode[0].exchange.links
    for worker in group.prefill:
        await known.get(group.addresses[worker])
    async with asyncio.timeout(30):
        while any(link.load is None for link in known.live()):
            await asyncio.sleep(0.001)


async def until_it_says_so(group: WorkerGroup, worker: Node) -> None:
    link = group.decode[0].exchange.links.known(group.addresses[worker])
    assert link is not None
    async with asyncio.timeout(30):
        while link.load is None or not link.load.draining:
            await asyncio.sleep(0.01)


async def test_the_first_is_asked_that_does_not_drain(
    group: WorkerGroup, caplog: pytest.LogCaptureFixture
) -> None:
    await meet(group)
    first, second = num_steps(group)
    await group.ask(PROMPTS[0], PARAMS, computed_by=group.prefill, local=LocalPrefill.NEVER)
    assert num_steps(group)[0] > first
    assert num_steps(group)[1] == second
    group.prefill[0].begin_drain()
    await until_it_says_so(group, group.prefill[0])
    await group.ask(PROMPTS[1], PARAMS, computed_by=group.prefill, local=LocalPrefill.NEVER)
    assert num_steps(group)[1] > second
    assert "failed" not in caplog.text, "the first one would have refused"


async def test_nobody_is_asked_that_was_not_heard_of_for_long(group: WorkerGroup) -> None:
    await meet(group)
    decode = group.decode[0]
    link = decode.exchange.links.known(group.addresses[group.prefill[0]])
    assert link is not None
    link.heard_at -= 3.0
    group.prefill[1].begin_drain()
    await until_it_says_so(group, group.prefill[1])
    link.heard_at -= 3.0
    asked = [
        group.ask(prompt, PARAMS, computed_by=group.prefill, local=LocalPrefill.AUTO)
        for prompt in PROMPTS
    ]
    await asyncio.gather(*asked)
    assert decode.fetcher.ends.total() == 0


async def test_a_link_that_is_lost_before_it_is_used_is_made_again(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a peer that dies in the moment in which its link is there for whoever waits for it."""
    known, get = group.decode[0].exchange.links, links.Links.get
    got: list[Link] = []

    async def get_and_lose(self: links.Links, address: str, incarnation: int = 0) -> Link:
        got.append(await get(self, address, incarnation))
        if len(got) < 5:
            got[-1].lose("a test")
        return got[-1]

    monkeypatch.setattr(links.Links, "get", get_and_lose)
    only = group.prefill[:1]
    answer = await group.ask(PROMPTS[0], PARAMS, computed_by=only, local=LocalPrefill.NEVER)
    assert len(answer.tokens[0]) == 2
    assert known.live() == got[-1:]


async def test_a_link_that_breaks_under_many_choices_breaks_once(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which go on from tokens of their own, so that each asks for itself."""
    asked: list[HandOff] = []
    all_have_asked, run = asyncio.Event(), HandOff.run

    async def ask_and_break_off(hand_off: HandOff) -> Pulled:
        asked.append(hand_off)
        if len(asked) > 4:
            return await run(hand_off)
        if len(asked) == 4:
            all_have_asked.set()
        await all_have_asked.wait()
        hand_off._link.lose("a test")
        raise LinkLost("a test")

    monkeypatch.setattr(HandOff, "run", ask_and_break_off)
    params = replace(PARAMS, n=4, max_tokens=3)
    sent = tuple(ChoiceSoFar([token]) for token in range(4))
    only = group.prefill[:1]
    answer = await group.ask(
        PROMPTS[0], params, computed_by=only, local=LocalPrefill.NEVER, sent=sent
    )
    assert [len(tokens) for tokens in answer.tokens.values()] == [2] * 4
    assert len(asked) == 8


async def test_a_link_that_takes_long_to_make_holds_up_one_prompt(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that not for longer than it takes here, and a moment."""
    decode, asked = group.decode[0], []

    async def make(address: str) -> Link:
        asked.append(address)
        return await asyncio.Future()

    monkeypatch.setattr(decode.exchange.links._maker, "make", make)
    monkeypatch.setattr(fetching, "GRACE_S", 0.05)
    monkeypatch.setattr(links, "LONG_MAKING_S", 0.05)
    decode.engine.engine.step_times = StepTimes()
    for prompt in PROMPTS[:3]:
        await group.ask(prompt, PARAMS, computed_by=group.prefill[:1], local=LocalPrefill.AUTO)
    assert decode.fetcher.ends == Counter({FetchEnd.COMPUTED_HERE: 1})
    assert asked == [group.addresses[group.prefill[0]]]


async def test_many_at_once_are_shared_out(group: WorkerGroup) -> None:
    """Before any report could say so: what was sent there waits there."""
    await meet(group)
    before = num_steps(group)
    asked = [
        group.ask(prompt, PARAMS, computed_by=group.prefill[:1], local=LocalPrefill.AUTO)
        for prompt in PROMPTS
    ]
    await asyncio.gather(*asked)
    assert num_steps(group)[0] > before[0]
    fetched = group.decode[0].fetcher.ends[FetchEnd.DELIVERED]
    assert 0 < fetched < len(PROMPTS)
    under_way = group.decode[0].answerer._under_way
    left = (under_way.num_queued, under_way.num_fetched, under_way.num_running)
    assert left == (0, 0, 0)


async def test_a_worker_of_shorter_sequences_fails_nobody(tmp_path: Path) -> None:
    """It says so; the next one computes the prompt, or else the decode worker does."""
    folder = str(make_tiny("llama", tmp_path).folder)
    short = make_engine(folder, max_model_len=100, max_num_batched_tokens=32)
    group = await WorkerGroup.start(
        [make_engine(folder)], [short, make_engine(folder)], "inprocess"
    )
    await group.ask(PROMPTS[0], PARAMS, computed_by=group.prefill[:1])
    assert group.decode[0].fetcher.ends == Counter({FetchEnd.COMPUTED_HERE: 1})
    await group.ask(PROMPTS[1], PARAMS, computed_by=group.prefill, local=LocalPrefill.NEVER)
    assert num_steps(group)[0] == 0 < num_steps(group)[1]
    await group.check_idle()
    await group.stop()
