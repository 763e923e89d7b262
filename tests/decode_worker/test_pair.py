"""Two workers answer token for token as one engine does, whatever carries the blocks (fp32)."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from decode_worker.answerer import LocalPrefill
from engine.async_engine import AsyncEngine
from engine.async_streams import HandOverStream
from engine.engine import Engine
from engine.errors import RequestError
from engine.handoff import Reservation
from engine.request import ChoiceSoFar, GenerationRequest, RequestId
from engine.sampling import SamplingParams
from prefill_worker.fetching import FetchEnd
from tests.decode_worker.worker_group import SlowSteps
from tests.decode_worker.worker_pair import WorkerPair
from tests.engine.models_on_disk import CONFIGS, make_tiny
from tests.engine.pair import make_engine
from tests.engine.test_exact import greedy, random_prompts
from tests.engine.test_hand_over import answer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.crossed("folder", "workers")]

CONNECTORS = ["inprocess", "socket", "nixl", "collective"]
HOT = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
PROMPTS = {n: random_prompts(1, n, n, seed=n)[0] for n in (1, 16, 17, 64, 100, 150)}
ASKED = [
    replace(HOT, max_tokens=1),
    replace(HOT, n=3, logprobs=2),
    replace(HOT, logprobs=0, prompt_logprobs=3),
    greedy(n=2, logprobs=3, prompt_logprobs=0, max_tokens=7),
    replace(HOT, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.3),
    replace(HOT, logit_bias={7: 100.0}, max_tokens=3),
    replace(HOT, allowed_token_ids=(3, 4, 5), stop_token_ids=(4, 5), min_tokens=4),
    replace(HOT, allowed_token_ids=(3,), stop_token_ids=(3,)),
]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param)).folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return make_engine(str(folder), max_num_seqs=9)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CONNECTORS)
async def workers(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[WorkerPair]:
    prefill = make_engine(str(folder), max_num_batched_tokens=32, scheduling_policy="shortest")
    decode = make_engine(str(folder), max_num_seqs=9)
    pair = await WorkerPair.start(prefill, decode, (request.param,))
    slow = SlowSteps()  # what the decode worker has is worth pulling
    slow.token_s = 0.1  # and is waited for as long as computing it would take
    prefill.step_times = slow
    yield pair
    await pair.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def pair(workers: WorkerPair, alone: Engine) -> AsyncIterator[WorkerPair]:
    alone.reset_prefix_cache()
    await workers.forget(workers.prefill, workers.decode)
    yield workers
    await workers.check_idle()


@pytest.mark.parametrize("length", sorted(PROMPTS))
async def test_cold_and_warm(pair: WorkerPair, alone: Engine, length: int) -> None:
    prompt = PROMPTS[length]
    expected = answer(alone, prompt, HOT)
    delivered = pair.decode.fetcher.ends[FetchEnd.DELIVERED]
    (await pair.ask(prompt, HOT)).check_equal(expected)  # cold
    assert pair.decode.fetcher.ends[FetchEnd.DELIVERED] == delivered + 1
    await pair.forget(pair.decode)
    (await pair.ask(prompt, HOT)).check_equal(expected)  # warm there
    assert pair.decode.fetcher.ends[FetchEnd.DELIVERED] == delivered + 2
    again = await pair.ask(prompt, HOT)  # warm here and there
    again.check_equal(expected)
    assert again.prompt is not None
    assert again.prompt.num_cached_tokens == min(length // 16 * 16, length - 1)
    await pair.forget(pair.prefill)
    (await pair.ask(prompt, HOT)).check_equal(expected)  # warm here


async def test_only_the_missing_range_travels(pair: WorkerPair, alone: Engine) -> None:
    prompt = PROMPTS[150]
    expected = answer(alone, prompt, HOT)
    for on_prefill, on_decode in ((96, 0), (0, 96), (64, 96), (96, 64)):
        await pair.check_idle()  # or what a lease still holds is not forgotten
        await pair.forget(pair.prefill, pair.decode)
        for worker, length in ((pair.prefill, on_prefill), (pair.decode, on_decode)):
            if length:
                one = replace(HOT, max_tokens=1)
                await warm(worker.engine, prompt[:length], one)
        before = num_pulled(pair)
        told = await pair.ask(prompt, HOT)
        told.check_equal(expected)
        assert told.prompt is not None
        assert told.prompt.num_cached_tokens == max(on_prefill, on_decode)
        assert num_pulled(pair) - before == num_missing(pair, len(prompt), on_decode)


def num_pulled(pair: WorkerPair) -> int:
    """Blobs, so far."""
    return sum(tally.num_blobs for tally in pair.decode.exchange.pulls.values())


def num_missing(pair: WorkerPair, num_tokens: int, num_cached: int) -> int:
    """Of a window's blobs only those are wanted that are seen from the last whole block's end."""
    wholes, end = num_tokens // 16, -(-num_tokens // 16)
    windows = [slab.layout.group.window for slab in pair.decode.engine.engine.slabs]
    firsts = [0 if window is None else (16 * wholes - window + 1) // 16 for window in windows]
    return sum(end - max(first, num_cached // 16) for first in firsts)


@pytest.mark.parametrize("params", ASKED)
async def test_whatever_is_asked_of_the_sampler(
    pair: WorkerPair, alone: Engine, params: SamplingParams
) -> None:
    for length in (17, 100):
        expected = answer(alone, PROMPTS[length], params)
        (await pair.ask(PROMPTS[length], params)).check_equal(expected)  # cold
        (await pair.ask(PROMPTS[length], params)).check_equal(expected)  # both warm
        await pair.forget(pair.decode)
        (await pair.ask(PROMPTS[length], params)).check_equal(expected)  # warm there
        await pair.forget(pair.prefill)
        (await pair.ask(PROMPTS[length], params)).check_equal(expected)  # warm here


@pytest.mark.parametrize("local", LocalPrefill)
async def test_what_leaves_no_token_is_the_requests_error(
    pair: WorkerPair, local: LocalPrefill
) -> None:
    """Known when the first token is drawn, wherever that is; another worker would say the same."""
    nothing = replace(HOT, allowed_token_ids=(3,), stop_token_ids=(3,), min_tokens=1)
    with pytest.raises(RequestError, match="^allowed_token_ids: no token is left"):
        await pair.ask(PROMPTS[64], nothing, local)


async def test_more_choices_than_run_at_once_where_the_prompt_is_computed(
    pair: WorkerPair, alone: Engine
) -> None:
    many = replace(HOT, n=pair.prefill.engine.engine.limits.max_num_seqs + 1)
    expected = answer(alone, PROMPTS[64], many)
    (await pair.ask(PROMPTS[64], many, LocalPrefill.NEVER)).check_equal(expected)


async def test_local_prefill_gives_the_same(pair: WorkerPair, alone: Engine) -> None:
    expected = answer(alone, PROMPTS[100], HOT)
    asks = pair.decode.fetcher.ends.total()
    told = await pair.ask(PROMPTS[100], HOT, LocalPrefill.ALWAYS)
    told.check_equal(expected)
    assert pair.decode.fetcher.ends.total() == asks


async def test_going_on_from_what_was_sent(pair: WorkerPair, alone: Engine) -> None:
    whole = answer(alone, PROMPTS[64], HOT).tokens[0]
    told = await pair.ask(PROMPTS[64], HOT, sent=(ChoiceSoFar(whole[:3]),))
    assert told.tokens[0] == whole[3:]


@pytest.mark.parametrize("params", [HOT, *ASKED[1:5]])
async def test_a_prompt_that_comes_without_a_token(
    pair: WorkerPair, alone: Engine, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    """As from a prefill worker that cannot draw by a grammar: where the prompt is answered, its
    last token is computed again."""
    hand_over = pair.prefill.engine.hand_over

    def without_drawing(request: GenerationRequest) -> HandOverStream:
        assert request.hand_over is not None
        return hand_over(replace(request, hand_over=replace(request.hand_over, draw=False)))

    monkeypatch.setattr(pair.prefill.engine, "hand_over", without_drawing)
    for length in (1, 16, 17, 100):
        prompt = PROMPTS[length]
        expected = answer(alone, prompt, params)
        steps = pair.decode.engine.engine.num_steps
        told = await pair.ask(prompt, params)  # cold
        told.check_equal(expected)
        num_tokens = max(map(len, told.tokens.values()))
        assert pair.decode.engine.engine.num_steps - steps == num_tokens, "one for the first token"
        await pair.forget(pair.prefill)
        (await pair.ask(prompt, params)).check_equal(expected)  # warm here
        await pair.forget(pair.decode)
        (await pair.ask(prompt, params)).check_equal(expected)  # warm there
        await pair.forget(pair.prefill, pair.decode)


async def test_a_request_that_is_gone_in_the_same_turn_leaves_nothing(pair: WorkerPair) -> None:
    """The fixture's check after the test is the test."""
    fetcher = pair.decode.fetcher
    reserved = fetcher.on_reserved

    def reserve_and_forget(reservation: Reservation) -> None:
        reserved(reservation)
        fetcher.forget(reservation.request_id)

    fetcher.on_reserved = reserve_and_forget  # type: ignore[method-assign]
    try:
        told = await pair.ask(PROMPTS[100], HOT)
    finally:
        del fetcher.on_reserved
    assert len(told.tokens[0]) == HOT.max_tokens
    assert fetcher.ends[FetchEnd.CANCELLED] > 0


async def test_many_at_once(pair: WorkerPair, alone: Engine) -> None:
    prompts = random_prompts(12, 5, 150, seed=3)
    expected = [answer(alone, prompt, HOT) for prompt in prompts]
    told = await asyncio.gather(*(pair.ask(prompt, HOT) for prompt in prompts))
    for mine, theirs in zip(told, expected, strict=True):
        mine.check_equal(theirs)


async def warm(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> None:
    stream = engine.submit(GenerationRequest(RequestId("warm"), prompt, params))
    async for _ in stream:
        pass
    stream.close()
