"""A decode worker that is too small for what it answers: clients leave whose sequences it has
preempted."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster.metrics.samples import value
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer
from tests.faults.conftest import CONNECTORS, PARAMS, PROMPTS
from tests.faults.fleet import until
from tests.faults.workers import ENGINE, SLACK_S, Relay, Worker, leave

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_SIZE = 16
BLOB_BYTES = 8192  # 2 layers, 2 heads, K and V, 16 tokens, 16 floats
NUM_BLOCKS = 44
MEMORY = (1 + NUM_BLOCKS) * BLOB_BYTES  # block 0 is none
NUM_PROMPT, NUM_TOKENS = 140, 200  # room for all four prompts, and in the end for two answers
LONG = replace(PARAMS, max_tokens=NUM_TOKENS)
ASKED = random_prompts(4, NUM_PROMPT, NUM_PROMPT, seed=12)
SHORT = {name: PROMPTS[name] for name in ("33", "100")}
SLOW = " ".join(f"worker.reserved:{number}=slow" for number in range(1, 5))  # before every step


@pytest.fixture(scope="module")
def right(model: Path) -> list[Answer]:
    engine = make_engine(str(model), **ENGINE)
    return [answer(engine, prompt, LONG) for prompt in ASKED]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefill(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("prefill"), model, "prefill", "auto")
    await worker.start()
    yield worker
    await worker.end()


@pytest_asyncio.fixture(loop_scope="module")
async def relay(
    mode: str,
    connector: str,
    model: Path,
    prefill: Worker,
    expected: dict[str, Answer],
    tmp_path: Path,
) -> AsyncIterator[Relay]:
    """After every test nothing is left of it, and twenty requests succeed."""
    decode = Worker(
        tmp_path,
        model,
        "decode",
        connector,
        kv_cache_memory_bytes=MEMORY,
        preemption_mode=mode,
        swap_space_bytes=MEMORY,
    )
    await decode.start()
    relay = Relay(prefill, prefill, decode)
    await relay.connect()
    yield relay
    await relay.mend()
    await relay.check_well(SHORT, expected, PARAMS)
    await relay.session.stop()
    await decode.end()


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_a_client_that_leaves_while_its_sequence_is_preempted(
    relay: Relay, right: list[Answer], mode: str
) -> None:
    """Two of four are. What the first of them has on the host, and its place in the queue, are
    given back while the others run; the other one comes back when there is room, and ends."""
    decode, shown = relay.decode, [Answer() for _ in ASKED]
    decode.set_faults(SLOW)
    asked = [
        asyncio.ensure_future(relay.ask(prompt, LONG, salt=f"long {i}", shown=shown[i]))
        for i, prompt in enumerate(ASKED)
    ]
    await until(lambda: all(one.tokens for one in shown), SLACK_S)
    await decode.until(lambda load: load.num_waiting == 2)
    run, wait = await moving(shown)
    assert (len(run), len(wait)) == (2, 2)
    page = await decode.metrics()
    assert value(page, "num_preemptions_total") == 2
    assert (value(page, "num_requests_running"), value(page, "num_requests_waiting")) == (2, 2)
    assert value(page, "sessions") == 1
    swaps = [num_blocks(shown[i]) if mode == "swap" else 0 for i in wait]
    assert await num_swapped(decode) == sum(swaps)

    await leave(asked[wait[1]])
    load = await decode.until(lambda load: load.num_waiting == 1)
    assert load.num_running == 2
    assert await num_swapped(decode) == swaps[0]
    report = await decode.health()
    assert report.healthy, report.reason
    assert await moving(shown) == (run, wait), "the others run still"
    assert load.blocks[0].held <= sum(num_blocks(shown[i]) for i in run)
    assert value(await decode.metrics(), "num_preemptions_total") == 2

    decode.set_faults("")
    for i in (*run, wait[0]):
        (await asked[i]).check_equal(right[i])
    assert await num_swapped(decode) == 0


async def moving(shown: Sequence[Answer]) -> tuple[list[int], list[int]]:
    """Whose tokens come, and whose have stopped coming while those of two others did."""
    before = [len(answer.tokens[0]) for answer in shown]

    def come() -> list[int]:
        return [i for i, one in enumerate(shown) if len(one.tokens[0]) >= before[i] + 3]

    await until(lambda: len(come()) == 2, SLACK_S)
    run = come()
    return run, [i for i in range(len(shown)) if i not in run]


def num_blocks(answer: Answer) -> int:
    """Of all but its last token, whose keys and values nobody has computed."""
    return -(-(NUM_PROMPT + len(answer.tokens[0]) - 1) // BLOCK_SIZE)


async def num_swapped(worker: Worker) -> float:
    return value(await worker.metrics(), "swapped_blocks")
