"""A decode worker that is too small for what it answers preempts while prompts go on arriving:
token for token as one engine with room for all (fp32)."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from decode_worker.answerer import LocalPrefill
from engine.engine import Engine
from engine.handoff import Reservation
from engine.memory import bytes_needed
from engine.sampling import SamplingParams
from engine.scheduler.sequence import Sequence
from engine.scheduler.swap import SwapSpace
from engine.step import HostCopy
from prefill_worker.fetching import FetchEnd
from tests.decode_worker.worker_pair import WorkerPair
from tests.engine.models_on_disk import CONFIGS, make_tiny
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer

pytestmark = pytest.mark.crossed("folder", "mode", "connector")

HOT = SamplingParams(temperature=1.0, seed=5, max_tokens=50, ignore_eos=True)
PROMPTS = random_prompts(12, 18, 40, seed=4)
SMALL = {"max_model_len": 96, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param)).folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return make_engine(str(folder))


Expected = Callable[[int, int], Answer]


@pytest.fixture(scope="module")
def expected(alone: Engine) -> Expected:
    """Of one engine, which is asked once for a prompt's number and its choices."""
    return cache(lambda number, n: answer(alone, PROMPTS[number], replace(HOT, n=n)))


def small_engine(folder: Path, alone: Engine, mode: str) -> Engine:
    """Its cache has room for one sequence of the greatest length and a little."""
    num_bytes = bytes_needed(alone.info.cache.layouts, 96, 32)
    return make_engine(str(folder), preemption_mode=mode, kv_cache_memory_bytes=num_bytes, **SMALL)


@pytest.fixture
def taken_out(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Those whose blocks went to the host."""
    taken, take_out = [], SwapSpace.take_out

    def note(swap: SwapSpace, sequence: Sequence, block_size: int) -> list[HostCopy] | None:
        copies = take_out(swap, sequence, block_size)
        taken.extend([sequence] * (copies is not None))
        return copies

    monkeypatch.setattr(SwapSpace, "take_out", note)
    return taken


class Preemptions:
    """How many there had been whenever blocks for a prompt were reserved."""

    def __init__(self, pair: WorkerPair) -> None:
        self.seen: list[int] = []
        self._engine = pair.decode.engine
        self._reserved = pair.decode.fetcher.on_reserved
        self._asked: list[asyncio.Task[None]] = []
        pair.decode.fetcher.on_reserved = self._on_reserved  # type: ignore[method-assign]

    def _on_reserved(self, reservation: Reservation) -> None:
        self._asked.append(asyncio.ensure_future(self._note()))
        self._reserved(reservation)

    async def _note(self) -> None:
        stats = await self._engine.ask(lambda engine: engine.scheduler_stats())
        self.seen.append(stats.num_preemptions)

    async def wait(self) -> None:
        await asyncio.gather(*self._asked)


@pytest.mark.parametrize("connector", ["socket", "nixl"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_preempted_while_others_arrive(
    folder: Path,
    alone: Engine,
    expected: Expected,
    mode: str,
    connector: str,
    taken_out: list[Sequence],
) -> None:
    decode = small_engine(folder, alone, mode)
    pair = await WorkerPair.start(make_engine(str(folder)), decode, (connector,))
    preemptions = Preemptions(pair)
    nums = [1 + (i % 4 == 0) for i in range(len(PROMPTS))]
    asks = [pair.ask(prompt, replace(HOT, n=n)) for prompt, n in zip(PROMPTS, nums, strict=True)]
    for i, told in enumerate(await asyncio.gather(*asks)):
        told.check_equal(expected(i, nums[i]))
    await pair.check_idle()
    await preemptions.wait()
    assert len(preemptions.seen) == len(PROMPTS), "nobody fetches again"
    assert preemptions.seen[-1] > 0, "some were preempted before the last one came"
    assert bool(taken_out) == (mode == "swap")
    await pair.stop()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_preempted_while_prompts_of_both_kinds_arrive(
    folder: Path, alone: Engine, expected: Expected, mode: str, taken_out: list[Sequence]
) -> None:
    """Every other prompt is computed here, in chunks, between those that come."""
    pair = await WorkerPair.start(
        make_engine(str(folder)), small_engine(folder, alone, mode), ("inprocess",)
    )
    modes = (LocalPrefill.NEVER, LocalPrefill.ALWAYS)
    asks = [pair.ask(prompt, HOT, modes[i % 2]) for i, prompt in enumerate(PROMPTS)]
    for i, told in enumerate(await asyncio.gather(*asks)):
        told.check_equal(expected(i, 1))
    await pair.check_idle()
    stats = await pair.decode.engine.ask(lambda engine: engine.scheduler_stats())
    assert stats.num_preemptions > 0
    assert bool(taken_out) == (mode == "swap")
    assert pair.decode.fetcher.ends[FetchEnd.DELIVERED] == len(PROMPTS) // 2
    await pair.stop()
