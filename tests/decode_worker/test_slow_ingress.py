"""A client that does not read its session, beside one that does."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from cluster.session import SessionBackend
from decode_worker import worker
from decode_worker.answerer import LocalPrefill, Route, SubmittedRequest, encode_submit
from decode_worker.service import SessionLimits, SessionService
from decode_worker.worker import DecodeWorker
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from prefill_worker.node import NodeConfig
from protos.generation_pb2 import Failure
from protos.limits import PROTOCOL
from protos.rpc import Plane
from protos.session_pb2 import DecodeMessage, Hello, IngressMessage
from protos.session_pb2_grpc import SessionStub
from protos.worker_pb2 import ROLE_DECODE
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import Answer, make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer

PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(logprobs=20, max_tokens=1900, ignore_eos=True)
PROMPT = random_prompts(1, 30, 30)[0]
NUM_SLOW = 40  # of 64 that may run
STALL_S = 5.0  # long before they have all their tokens, and for two answers on a busy machine
ROOM: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20}
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
HERE = Route(local_prefill=LocalPrefill.ALWAYS)


@dataclass
class Serving:
    worker: DecodeWorker
    address: str
    expected: Answer


@pytest_asyncio.fixture
async def serving(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Serving]:
    limits = SessionLimits(max_stall_s=STALL_S)
    monkeypatch.setattr(worker, "SessionService", partial(SessionService, limits=limits))
    folder: Path = make_tiny(
        "llama", tmp_path_factory.mktemp("model"), max_position_embeddings=2048
    ).folder
    expected = answer(make_engine(str(folder)), PROMPT, PARAMS)
    config = NodeConfig(role=ROLE_DECODE, connectors=("inprocess",))
    engine = make_engine(str(folder), max_num_seqs=64, **ROOM)
    serving = DecodeWorker(config, engine)
    await serving.start()
    yield Serving(serving, await serving.serve(), expected)
    await serving.stop()


async def flood(call: "grpc.aio.StreamStreamCall[IngressMessage, DecodeMessage]") -> None:
    """More than the connection takes while nobody reads."""
    await call.write(IngressMessage(hello=Hello(protocol=PROTOCOL)))
    for number in range(NUM_SLOW):
        request = GenerationRequest(RequestId(str(number)), PROMPT, LONG)
        message = encode_submit(SubmittedRequest(request, HERE))
        await call.write(IngressMessage(submit=message))


async def ask(backend: SessionBackend, number: int) -> Answer:
    name = RequestId(f"r{number}")
    told = Answer()
    async for update in backend.submit(GenerationRequest(name, PROMPT, PARAMS), HERE):
        told.take(StepOutput({name: update}, {}), name)
    return told


async def test_it_stalls_itself_alone(serving: Serving) -> None:
    backend = SessionBackend(serving.address, Plane())
    await backend.start()
    sessions = serving.worker.sessions
    async with grpc.aio.insecure_channel(serving.address, SMALL_WINDOW) as channel:
        call = SessionStub(channel).Open()
        await flood(call)
        async with asyncio.timeout(30):
            while sessions.num_requests < NUM_SLOW:
                await asyncio.sleep(0.005)
        number = 0
        async with asyncio.timeout(60):
            while sessions.num_requests:
                (await ask(backend, number)).check_equal(serving.expected)
                number += 1
        assert number >= 2, "all of these were answered while the other one read nothing"
        message = await call.read()
        while isinstance(message, DecodeMessage) and message.WhichOneof("kind") != "failure":
            message = await call.read()
        assert isinstance(message, DecodeMessage)
        assert message.failure.kind == Failure.KIND_BUSY
        assert "was not read" in message.failure.message
    (await ask(backend, number)).check_equal(serving.expected)
    assert not serving.worker.engine.engine.has_work
    await backend.stop()
