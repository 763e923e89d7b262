"""`kvrelay worker` as its user runs it: processes, signals, a configuration file."""

import asyncio
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.session import SessionBackend
from cluster.session_stream import SessionStream
from engine.errors import UnavailableError
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from protos.rpc import Plane
from protos.secret import Secret
from tests.engine.models_on_disk import make_tiny
from tests.processes import python

SECRET = "of all the clusters in the world"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worker")
    make_tiny("llama", folder / "model", max_position_embeddings=2048)
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    path = folder / "worker.yaml"
    path.write_text(
        f"role: decode\nconnector: socket\nrpc:\n  secret_file: {secret}\nengine:\n"
        f"  model: {folder / 'model'}\n  dtype: float32\n  kernels: reference\n"
        "  kv_cache_memory_bytes: 4000000\n"
    )
    return path


@asynccontextmanager
async def running(*words: str) -> AsyncIterator[tuple[Process, str]]:
    """A worker that is ready, and its address."""
    async with python("-m", "cluster.cli", "worker", *words) as (child, line):
        yield child, line.split()[-1]


def request(max_tokens: int) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(RequestId(f"r{max_tokens}"), [1, 2, 3], params)


async def to_the_end(stream: SessionStream) -> None:
    async for _ in stream:
        pass


async def ended(child: Process, seconds: float) -> int:
    async with asyncio.timeout(seconds):
        return await child.wait()


async def test_a_told_worker_finishes_its_answers_and_takes_no_new_ones(config: Path) -> None:
    async with running("--config", str(config)) as (child, address):
        backend = SessionBackend(address, Plane(Secret(SECRET.encode())))
        await backend.start()
        stream = backend.submit(request(300))
        num_tokens = sum(len(delta.token_ids) for delta in (await anext(stream)).deltas)
        child.send_signal(signal.SIGTERM)
        assert child.stderr is not None
        while b"draining" not in await child.stderr.readline():
            pass
        with pytest.raises(UnavailableError, match="draining"):
            await anext(backend.submit(request(3)))
        async for update in stream:
            num_tokens += sum(len(delta.token_ids) for delta in update.deltas)
        assert num_tokens == 300
        assert await ended(child, 10) == 0
        await backend.stop()


@pytest.mark.parametrize("second", [signal.SIGINT, None])
async def test_a_drain_ends_with_its_time_or_a_second_signal(
    config: Path, second: signal.Signals | None
) -> None:
    limit = ["--drain", "0.2"] if second is None else ["--drain", "600"]
    async with running("--config", str(config), *limit) as (child, address):
        backend = SessionBackend(address, Plane(Secret(SECRET.encode())))
        await backend.start()
        streams = [backend.submit(request(n)) for n in range(1990, 2000)]
        for stream in streams:
            await anext(stream)
        child.send_signal(signal.SIGINT)
        assert child.stderr is not None
        while b"draining" not in await child.stderr.readline():
            pass
        if second is not None:
            child.send_signal(second)
        with pytest.raises(UnavailableError):
            await asyncio.gather(*(to_the_end(stream) for stream in streams))
        assert await ended(child, 30) == 0
        await backend.stop()


async def test_strangers_are_refused(config: Path) -> None:
    async with running("--config", str(config), "--role", "prefill") as (_, address):
        with pytest.raises(UnavailableError, match="secret"):
            await SessionBackend(address, Plane()).start()
        known = SessionBackend(address, Plane(Secret(SECRET.encode())))
        with pytest.raises(UnavailableError, match="UNIMPLEMENTED"):
            await known.start()
