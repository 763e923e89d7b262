"""Two workers in processes of their own: one reads the prompts, the other answers.

Each connector is named with what moved the blocks under it. A sandbox may keep UCX from the card's
memory: then NIXL is refused and says so, or hangs, and what workers choose by themselves serves.
"""

import asyncio
import re
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from cluster.session import SessionBackend
from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route
from engine.errors import EngineError
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from protos.rpc import Plane
from tests.engine.models_on_disk import VOCAB, make_tiny
from tests.processes import python

CONNECTORS = ("socket", "nixl", "auto")  # kernels are compiled for the first one's workers
ROLES = ("prefill", "decode")
LENGTHS = (40, 1500)  # of prompts; the longer one in several chunks
NUM_TOKENS = 16
ANSWER_S = 30.0
LEFT_S = 25.0  # for each connector that is still to come
LINK = re.compile(r"linked to \S+ by (\w+) \(([^)]+)\)")


def run(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        with torch.inference_mode(False):
            model = make_tiny("llama", folder / "model", max_position_embeddings=2048)
        prompts = [torch.randint(3, VOCAB, (length,)).tolist() for length in LENGTHS]
        expected = model.greedy(prompts, NUM_TOKENS)
        for number, connector in enumerate(CONNECTORS, 1):
            to_come = len(CONNECTORS) - number
            served = _served(bench, folder, connector, prompts, expected)
            try:
                asyncio.run(asyncio.wait_for(served, bench.seconds_left - to_come * LEFT_S))
            except (EngineError, TimeoutError) as error:
                bench.say(f"{connector}: {error!r}, workers say {_logs(folder, connector)}")
                refused = f"{connector} is refused, see the log"
                bench.check(refused, 0.0 if connector == "nixl" else 1.0, 0.0)


async def _served(
    bench: Bench, folder: Path, connector: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with AsyncExitStack() as stack:
        starting = [
            stack.enter_async_context(
                python(
                    *("-m", "benchmarks.gpu.worker_process", str(folder / "model")),
                    *(role, connector),
                    log=folder / f"{connector} {role}.log",
                )
            )
            for role in ROLES
        ]
        lines = [line for _, line in await asyncio.gather(*starting)]
        if not all(lines):
            raise TimeoutError("a worker did not start")
        bench.say(f"{connector}: workers say {_logs(folder, connector)}")
        prefill, decode = lines
        route = Route((PrefillCandidate(prefill),), (), LocalPrefill.NEVER)
        backend = SessionBackend(decode, Plane(), route=route)
        await backend.start()
        started = time.monotonic()
        answers = [await _answer(backend, number, prompt) for number, prompt in enumerate(prompts)]
        bench.say(f"{connector}: answered in {time.monotonic() - started:.2f} s")
        await backend.stop()
        carried = _carried((folder / f"{connector} decode.log").read_text())
        wrong = sum(
            a != e
            for answer, tokens in zip(answers, expected, strict=True)
            for a, e in zip(answer, tokens, strict=True)
        )
        bench.check(f"two workers, {connector}: {carried}, tokens that differ", wrong, 0.0)


async def _answer(backend: SessionBackend, number: int, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens: list[int] = []
    async with asyncio.timeout(ANSWER_S):
        async for update in backend.submit(
            GenerationRequest(RequestId(str(number)), prompt, params)
        ):
            for delta in update.deltas:
                tokens += delta.token_ids
    return tokens


def _logs(folder: Path, connector: str) -> str:
    return "".join(
        path.read_text()[-3000:]
        for path in (folder / f"{connector} {role}.log" for role in ROLES)
        if path.exists()
    )


def _carried(log: str) -> str:
    """By the decode worker's own words: connector and transport of its link."""
    found = LINK.search(log)
    assert found is not None, log
    return " over ".join(found.groups())
