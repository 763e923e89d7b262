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
from tests.forked import Forked, first_line, forked
from tests.processes import python

SECRET = "of all the clusters in the world"
LONG = range(1990, 2000)  # tokens of each of several answers: together, many seconds
SHORT = 60  # of one that goes on when it has been asked whether another may come


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
        "  kv_cache_memory_bytes: 4000000\n  num_threads: 1\n"
    )
    return path


@asynccontextmanager
async def running(log: Path, *words: str) -> AsyncIterator[tuple[Forked, str]]:
    """A worker that is ready, and its address."""
    async with forked("cluster.cli", "worker", *words, log=log) as child:
        yield child, (await first_line(child, log)).split()[-1]


async def drains(log: Path) -> None:
    """Returns when it has said so."""
    async with asyncio.timeout(30):
        while "draining" not in log.read_text():
            await asyncio.sleep(0.005)


def request(max_tokens: int) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(RequestId(f"r{max_tokens}"), [1, 2, 3], params)


async def to_the_end(stream: SessionStream) -> None:
    async for _ in stream:
        pass


async def ended(child: Process | Forked, seconds: float) -> int:
    async with asyncio.timeout(seconds):
        return await child.wait()


async def test_a_told_worker_finishes_its_answers_and_takes_no_new_ones(
    config: Path, tmp_path: Path
) -> None:
    words, log = ("-m", "cluster.cli", "worker", "--config", str(config)), tmp_path / "log"
    async with python(*words, log=log) as (child, line):
        assert line, log.read_text()
        backend = SessionBackend(line.split()[-1], Plane(Secret(SECRET.encode())))
        await backend.start()
        # Without them all could be answered, and the worker gone, before it is asked once more.
        others = [backend.submit(request(n)) for n in LONG]
        stream = backend.submit(request(SHORT))
        num_tokens = sum(len(delta.token_ids) for delta in (await anext(stream)).deltas)
        child.send_signal(signal.SIGTERM)
        await drains(log)
        with pytest.raises(UnavailableError, match="draining"):
            await anext(backend.submit(request(3)))
        for other in others:
            other.close()
        async for update in stream:
            num_tokens += sum(len(delta.token_ids) for delta in update.deltas)
        assert num_tokens == SHORT
        assert await ended(child, 10) == 0
        await backend.stop()


@pytest.mark.parametrize("second", [signal.SIGINT, None])
async def test_a_drain_ends_with_its_time_or_a_second_signal(
    config: Path, tmp_path: Path, second: signal.Signals | None
) -> None:
    log = tmp_path / "log"
    limit = ["--drain", "0.2"] if second is None else ["--drain", "600"]
    async with running(log, "--config", str(config), *limit) as (child, address):
        backend = SessionBackend(address, Plane(Secret(SECRET.encode())))
        await backend.start()
        streams = [backend.submit(request(n)) for n in LONG]
        for stream in streams:
            await anext(stream)
        child.send_signal(signal.SIGINT)
        await drains(log)
        if second is not None:
            child.send_signal(second)
        with pytest.raises(UnavailableError):
            await asyncio.gather(*(to_the_end(stream) for stream in streams))
        assert await ended(child, 30) == 0
        await backend.stop()


async def test_strangers_are_refused(config: Path, tmp_path: Path) -> None:
    words = ("--config", str(config), "--role", "prefill")
    async with running(tmp_path / "log", *words) as (_, address):
        with pytest.raises(UnavailableError, match="secret"):
            await SessionBackend(address, Plane()).start()
        known = SessionBackend(address, Plane(Secret(SECRET.encode())))
        with pytest.raises(UnavailableError, match="no decode worker answers there"):
            await known.start()
