"""Answers that fit a grammar, where the prompt is computed on another worker."""

import json
from collections.abc import AsyncIterator

import jsonschema
import pytest
import pytest_asyncio

from decode_worker.answerer import LocalPrefill
from engine.engine import Engine
from engine.request import ChoiceSoFar, FinishReason
from prefill_worker.fetching import FetchEnd
from tests.decode_worker.worker_pair import WorkerPair
from tests.engine.grammar.cases import PERSON, hot, make_engine, prompt, said, schema
from tests.engine.test_hand_over import answer

pytestmark = pytest.mark.asyncio(loop_scope="module")


# A prompt's length and its choices. Connectors carry whole blocks, whatever is drawn behind them:
# one case for each is enough.
CASES = {"inprocess": (5, 1), "socket": (16, 2), "nixl": (60, 3)}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CASES)
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[WorkerPair]:
    pair = await WorkerPair.start(
        make_engine(max_num_batched_tokens=32), make_engine(), (request.param,)
    )
    yield pair
    await pair.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def pair(workers: WorkerPair) -> AsyncIterator[WorkerPair]:
    yield workers
    await workers.check_idle()
    await workers.forget(workers.prefill, workers.decode)


@pytest.fixture(scope="module")
def alone() -> Engine:
    return make_engine()


@pytest.mark.parametrize(("workers", "case"), CASES.items(), indirect=["workers"], scope="module")
async def test_two_workers_say_what_one_does(
    pair: WorkerPair, alone: Engine, case: tuple[int, int]
) -> None:
    length, n = case
    text = (prompt("Somebody with a name and an age, please. ") * 8)[:length]
    params = hot(schema(PERSON), length, n=n, logprobs=1)
    expected = answer(alone, text, params)
    (await pair.ask(text, params)).check_equal(expected)
    (await pair.ask(text, params, LocalPrefill.ALWAYS)).check_equal(expected)
    for choice, tokens in expected.tokens.items():
        if expected.reasons[choice] is FinishReason.STOP:
            jsonschema.validate(json.loads(said(tokens)), PERSON)
    sent = tuple(ChoiceSoFar(tokens[:4]) for tokens in expected.tokens.values())
    told = await pair.ask(text, params, sent=sent)
    for choice, tokens in expected.tokens.items():
        assert told.tokens[choice] == tokens[4:]
    assert pair.decode.fetcher.ends[FetchEnd.DELIVERED] >= 1
    assert not pair.prefill.engine.engine.grammars._kept, "the decode worker's alone"


async def test_workers_agree_with_a_cold_and_a_warm_cache(pair: WorkerPair) -> None:
    params = hot(schema(PERSON), 1)
    told = [await pair.ask(prompt() * 6, params) for _ in range(2)]
    await pair.decode.engine.ask(Engine.reset_prefix_cache)
    told.append(await pair.ask(prompt() * 6, params))
    assert told[0].tokens == told[1].tokens == told[2].tokens
