"""A prefill worker stops in the middle of a READ and goes on when its blocks have other tokens.

On one host over nixl; where nixl cannot read without the holder's help, so that the link has to
choose sockets by itself; and through a communicator, where the holder always helps.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from decode_worker.answerer import LocalPrefill
from engine.engine import Engine
from engine.errors import UnavailableError
from protos.handoff_pb2 import BlockRun
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer
from tests.faults.conftest import PARAMS
from tests.faults.fleet import until
from tests.faults.workers import ENGINE, NOTICED_S, SLACK_S, Relay, Worker, cached

pytestmark = pytest.mark.asyncio(loop_scope="module")

# 8 layers, 8 heads, K and V, 128 floats: a prompt's blocks are 32 MiB, far more than sockets
# buffer.
WIDE: dict[str, Any] = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
}
BLOB_BYTES = 16 * 8 * 8 * 2 * 128 * 4
NUM_BLOCKS = 64
POOL: dict[str, Any] = {
    "kv_cache_memory_bytes": NUM_BLOCKS * BLOB_BYTES,
    "max_num_batched_tokens": 512,
}
TOUCHED_S = 30.0
LOST_S = NOTICED_S + SLACK_S  # the most that a request takes whose holder is lost
PROMPTS = random_prompts(3, 480, 480, seed=11)  # of 30 blocks: two fill a pool
SHORT = {str(n): PROMPTS[0][:n] for n in (20, 40)}
FAR: dict[str, dict[str, Any]] = {
    "nixl": {"connector": "nixl"},
    "tcp": {"connector": "auto", "environment": {"UCX_TLS": "tcp"}},
    "another PID namespace": {"connector": "auto", "apart": True},
    "collective": {"connector": "collective"},
}
KINDS = [("collective" if kind == "collective" else "auto", kind) for kind in FAR]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("wide"), **WIDE).folder


@pytest.fixture(scope="module")
def engine(wide: Path) -> Engine:
    return make_engine(str(wide), **{**ENGINE, **POOL})


@pytest.fixture(scope="module")
def right(engine: Engine) -> list[Answer]:
    return [answer(engine, prompt, PARAMS) for prompt in PROMPTS[1:]]


@pytest.fixture(scope="module")
def short(engine: Engine) -> dict[str, Answer]:
    return {name: answer(engine, prompt, PARAMS) for name, prompt in SHORT.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decode(
    request: pytest.FixtureRequest, wide: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Worker]:
    worker = Worker(
        tmp_path_factory.mktemp("decode"),
        wide,
        "decode",
        request.param,
        unreachable_patience_s=0.0,  # a holder that is lost is not tried again
        **POOL,
    )
    await worker.start()
    await touched(worker)
    yield worker
    await worker.end()


async def touched(worker: Worker) -> None:
    """All of its cache: a first touch of so much may take longer than an engine may be stuck."""
    await until(lambda: "of cache touched" in worker.log.read_text(), TOUCHED_S)


@pytest_asyncio.fixture(loop_scope="module")
async def relay(
    kind: str, wide: Path, decode: Worker, short: dict[str, Answer], tmp_path: Path
) -> AsyncIterator[Relay]:
    """After every test nothing is left of it, and twenty requests succeed."""
    prefill = Worker(tmp_path, wide, "prefill", **FAR[kind], **POOL)
    await prefill.start()
    await touched(prefill)
    relay = Relay(prefill, prefill, decode)
    await relay.connect()
    yield relay
    await relay.check_well(SHORT, short, PARAMS)
    await relay.session.stop()
    await prefill.end()


@pytest.mark.parametrize(("decode", "kind"), KINDS, indirect=["decode"], scope="module")
async def test_not_one_byte_changes(kind: str, relay: Relay, right: list[Answer]) -> None:
    holder, decode = relay.first, relay.decode
    await relay.ask(PROMPTS[0][:40], PARAMS, holder, salt=kind)
    connector = kind if kind in ("nixl", "collective") else "socket"
    incarnation = (await holder.load()).incarnation
    links = {link.peer_incarnation: link for link in (await decode.load()).links}
    assert links[incarnation].connector == connector

    decode.set_faults("puller.reading=stop")  # the READ is posted
    lost = asyncio.ensure_future(relay.ask(PROMPTS[0], PARAMS, holder, timeout_s=LOST_S))
    await decode.stopped()
    holder.send(signal.SIGSTOP)
    await holder.stopped()
    decode.go_on()
    if kind != "nixl":  # which copies without the holder
        assert (await decode.load()).transfer.num_reads > 0
    with pytest.raises(UnavailableError):
        await lost
    await decode.until(lambda load: not any(blocks.quarantined for blocks in load.blocks))

    async def again() -> list[Answer]:
        asked = [
            relay.ask(prompt, PARAMS, local=LocalPrefill.ALWAYS, salt=f"{kind} {i}")
            for i, prompt in enumerate(PROMPTS[1:])
        ]
        return await asyncio.gather(*asked)

    async def blocks() -> list[list[BlockRun]]:
        salted = [(prompt, f"{kind} {i}") for i, prompt in enumerate(PROMPTS[1:])]
        return [await cached(decode, prompt, salt) for prompt, salt in salted]

    for told, expected in zip(await again(), right, strict=True):
        told.check_equal(expected)
    before = await blocks()
    found = [block for runs in before for run in runs for block in run.blocks]
    assert len(set(found)) == 60, "of the lost one's 30 blocks nearly all"
    assert sum(group.total for group in (await decode.load()).blocks) <= NUM_BLOCKS
    holder.go_on()
    await holder.check_settled()
    assert await blocks() == before, "with their checksums"
    for told, expected in zip(await again(), right, strict=True):
        told.check_equal(expected)
        assert told.prompt is not None
        assert told.prompt.num_cached_tokens >= 464, "it was computed anew"
