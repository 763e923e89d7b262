"""A decode worker keeps its requests' deadlines, whether or not their ingress does."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.session import SessionBackend
from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route
from engine.errors import DeadlineError
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from protos.rpc import Plane
from tests.decode_worker.worker_pair import WorkerPair
from tests.engine.held import held
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import make_engine

PROMPT = list(range(100))
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
SHORT_S = 0.3


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[WorkerPair]:
    folder = str(make_tiny("llama", tmp_path).folder)
    pair = await WorkerPair.start(make_engine(folder), make_engine(folder), ("inprocess",))
    yield pair
    await pair.check_idle()
    await pair.stop()


@pytest.mark.parametrize("which", ["prefill", "decode"])
@pytest.mark.parametrize("local", [LocalPrefill.NEVER, LocalPrefill.AUTO])
async def test_whichever_engine_hangs(pair: WorkerPair, which: str, local: LocalPrefill) -> None:
    """Told over the session, and nothing is left on either side."""
    session = SessionBackend(pair.decode_address, Plane())
    await session.start()
    with held((pair.prefill if which == "prefill" else pair.decode).engine):
        request = GenerationRequest(RequestId("late"), PROMPT, PARAMS, timeout_s=SHORT_S)
        route = Route(tuple(PrefillCandidate(a) for a in pair.addresses), (), local)
        started = time.monotonic()
        stream = session.submit(request, route)
        async with asyncio.timeout(30):
            with pytest.raises(DeadlineError, match="in time|the request's time"):
                await anext(stream)
        assert SHORT_S <= time.monotonic() - started < SHORT_S + 10
        assert pair.decode.engine.num_open == 0
    await session.stop()
