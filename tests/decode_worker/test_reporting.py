"""What a decode worker says of itself, to whoever routes or scales."""

import asyncio
from pathlib import Path

from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route, SubmittedRequest
from decode_worker.worker import DecodeWorker
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from kv_transfer.faults import Faults
from prefill_worker.node import NodeConfig
from protos.worker_pb2 import ROLE_DECODE
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import make_engine
from tests.engine.test_exact import random_prompts

LONG = SamplingParams(max_tokens=180, ignore_eos=True)


async def test_prompts_that_wait_to_be_computed_here_are_reported(tmp_path: Path) -> None:
    """Another ingress sees them in no other way. Those that will be fetched are the others'."""
    engine = make_engine(
        str(make_tiny("llama", tmp_path).folder), max_num_seqs=1, max_model_len=256
    )
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
    assert report.num_queued_tokens == len(prompts[1]) + len(prompts[2])
    for stream in streams:
        stream.close()
    await worker.stop()
