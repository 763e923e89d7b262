"""What a decode worker says of itself, to whoever routes or scales."""

import asyncio
import time
from importlib import metadata
from pathlib import Path

import pytest

from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route, SubmittedRequest
from decode_worker.worker import DecodeWorker
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from kv_transfer.faults import Faults
from prefill_worker.node import Node, NodeConfig
from protos.worker_pb2 import ROLE_DECODE
from tests.engine.held import held
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import make_engine
from tests.engine.test_exact import random_prompts

LONG = SamplingParams(max_tokens=180, ignore_eos=True)
STEP_S = 0.05  # so that the first answer lasts until it has been looked at


async def test_prompts_that_wait_to_be_computed_here_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another ingress sees them in no other way. Those that will be fetched are the others'."""
    engine = make_engine(
        str(make_tiny("llama", tmp_path).folder), max_num_seqs=1, max_model_len=256
    )
    step = engine.step

    def long_step() -> StepOutput:
        time.sleep(STEP_S)
        return step()

    monkeypatch.setattr(engine, "step", long_step)
    config = NodeConfig(role=ROLE_DECODE, connectors=("inprocess",))
    worker = DecodeWorker(config, engine, Faults())
    await worker.start()
    prompts = random_prompts(4, 40, 60, seed=1)
    modes = [LocalPrefill.ALWAYS] * 3 + [LocalPrefill.NEVER]
    streams = []
    for i, (prompt, mode) in enumerate(zip(prompts, modes, strict=True)):
        request = GenerationRequest(RequestId(str(i)), prompt, LONG)
        route = Route((PrefillCandidate("127.0.0.1:9"),), (), mode)
        streams.append(worker.answerer.submit(SubmittedRequest(request, route)))
    async with asyncio.timeout(30):
        while (report := await worker.reporter.load()).num_context_tokens <= len(prompts[0]):
            pass
    assert (report.num_running, report.num_waiting) == (1, 3)
    assert report.step_s > 0, "what the step under way should take"
    assert report.num_queued_tokens == len(prompts[1]) + len(prompts[2])
    for stream in streams:
        stream.close()
    await worker.stop()


async def test_the_first_report_of_a_busy_worker_has_figures(tmp_path: Path) -> None:
    """Nobody takes it for one without room, whatever its engine is at."""
    engine = make_engine(str(make_tiny("llama", tmp_path).folder))
    worker = Node(NodeConfig(connectors=("inprocess",)), engine, Faults())
    await worker.start()
    with held(worker.engine):
        report = await worker.reporter.load()
    (blocks,) = report.blocks
    assert blocks.total == blocks.free > 0
    await worker.stop()


async def test_a_worker_serves_from_a_source_tree_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that only measures."""

    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    engine = make_engine(str(make_tiny("llama", tmp_path).folder))
    worker = Node(NodeConfig(connectors=("inprocess",)), engine, Faults())
    await worker.start()
    assert worker.description.version == "not installed"
    await worker.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("socket", "kv_transfer.socket_server.SocketServer._sweep"),
        ("inprocess", "kv_transfer.piece_read.Backlog.wait"),
    ],
)
async def test_a_connector_whose_thread_fails_is_the_workers_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, broken: str
) -> None:
    engine = make_engine(str(make_tiny("llama", tmp_path).folder))
    worker = Node(NodeConfig(connectors=(name,)), engine, Faults())
    with monkeypatch.context() as patch:
        patch.setattr(broken, lambda _: 1 / 0)
        await worker.start()
        async with asyncio.timeout(30):
            while (report := await worker.check_health(False)).healthy:
                await asyncio.sleep(0.01)
    assert {"socket": "listens no more", "inprocess": "copies has failed"}[name] in report.reason
    assert (await worker.reporter.load()).unhealthy == report.reason
    await worker.stop()
