"""`kvrelay worker` processes that can be killed, stopped, made to fail, and asked how they are."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import grpc.aio
import httpx
import yaml

from cluster.session import SessionBackend
from decode_worker.answerer import LocalPrefill, PrefillCandidate, PrefixSource, Route
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from engine.wire.params import encode_params
from kv_transfer.pool_description import PoolDescription
from protos.events_pb2 import LoadReport, SubscribeRequest
from protos.events_pb2_grpc import WorkerEventsStub
from protos.handoff_pb2 import (
    Ask,
    BlockRun,
    Chunk,
    Commit,
    Compute,
    HolderMessage,
    PullerMessage,
)
from protos.handoff_pb2_grpc import HandOffStub
from protos.port import reserved_port
from protos.rpc import PROTOCOL, Plane
from protos.worker_pb2 import (
    DescribeRequest,
    DrainProgress,
    DrainRequest,
    HealthReport,
    HealthRequest,
    WorkerDescription,
)
from protos.worker_pb2_grpc import WorkerStub
from tests.cluster.metrics.samples import Samples, read, value
from tests.engine.pair import Answer
from tests.forked import Forked, first_line, forked
from tests.processes import python

SETTLED_S = 10.0  # within which nothing may be left of what failed
NOTICED_S = 2.0  # within which a stopped peer is noticed
NOTICED_HERE_S = NOTICED_S + 2.0  # where tests run, on cores that have more to do
RESTARTED_S = 30.0  # within which a process that was killed is there again
SLACK_S = 10.0  # for the request itself, on a busy machine

APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
ENGINE = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 4 << 20,
    "num_threads": 1,
    "stall_timeout_s": 1.0,
}
Hold = grpc.aio.StreamStreamCall[PullerMessage, HolderMessage]
_serial = count()


class Worker:
    """One process after the other at one address; each is another incarnation."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        role: str,
        connector: str,
        *,
        stuck_after_s: float = 1.0,
        max_quarantined_share: float = 0.25,
        unreachable_patience_s: float = RESTARTED_S,
        apart: bool = False,  # in a PID namespace of its own, as in another pod of the host
        environment: Mapping[str, str] | None = None,
        **engine: object,
    ) -> None:
        name = f"{role}-{next(_serial)}"
        self._faults = folder / f"{name}.faults"
        self._faults.write_text("")
        self._said_before = 0  # of its log, when its faults were last set
        self._config = folder / f"{name}.yaml"
        options = {
            "role": role,
            "connector": connector,
            "exchange": {
                "checksums": True,
                "stuck_after_s": stuck_after_s,
                "max_quarantined_share": max_quarantined_share,
                "unreachable_patience_s": unreachable_patience_s,
            },
            "engine": {"model": str(model), **ENGINE, **engine},
        }
        self._config.write_text(yaml.safe_dump(options))
        self.connector = connector
        self.log = folder / f"{name}.log"
        self._apart = apart
        self._environment = dict(environment or {})
        self.address = ""
        self._port = contextlib.ExitStack()  # nobody else gets it between two processes
        self.child: Process | Forked
        self.pid: int
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """At the address of the process before it, if there was one."""
        if not self.address:
            port = self._port.enter_context(reserved_port("127.0.0.1"))
            self.address = f"127.0.0.1:{port}"
        words = ("worker", "--config", str(self._config), "--listen", self.address)
        environment = {**self._environment, "KVRELAY_FAULTS": f"@{self._faults}"}
        if self._apart:
            module = ("-m", "cluster.cli")
            child = python(*module, *words, prefix=APART, log=self.log, **environment)
            self.child, line = await self._stack.enter_async_context(child)
            assert line, self.log.read_text()
        else:
            start = forked("cluster.cli", *words, log=self.log, environment=environment)
            self.child = await self._stack.enter_async_context(start)
            line = await first_line(self.child, self.log)
        self.pid = _only_child(self.child.pid) if self._apart else self.child.pid
        self.address = line.split()[-1]
        self.channel = Plane().channel(self.address)

    async def end(self) -> None:
        await self._stop()
        self._port.close()

    async def restart(self) -> None:
        self.set_faults("")
        await self._stop()
        await self.start()

    async def _stop(self) -> None:
        self.send(signal.SIGCONT)
        await self.channel.close()
        await self._stack.aclose()

    def set_faults(self, text: str) -> None:
        self._said_before = self.log.stat().st_size if self.log.exists() else 0
        self._faults.write_text(text)

    async def held_at(self, point: str) -> None:
        """Until one of its threads is, as these faults ask for."""
        async with asyncio.timeout(30):
            while not self.has_said(f"held at {point}"):
                await asyncio.sleep(0.005)

    def has_said(self, words: str) -> bool:
        """Since its faults were last set, as they are after every test."""
        return words.encode() in self.log.read_bytes()[self._said_before :]

    def send(self, number: signal.Signals) -> None:
        if self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def stopped(self) -> None:
        """Until its process has been stopped by a signal."""
        async with asyncio.timeout(30):
            while _state(self.pid) != "T":
                await asyncio.sleep(0.005)

    async def died(self, within_s: float = 10.0) -> int:
        async with asyncio.timeout(within_s):
            return await self.child.wait()

    def go_on(self) -> None:
        self.set_faults("")
        self.send(signal.SIGCONT)

    async def health(self) -> HealthReport:
        return await WorkerStub(self.channel).CheckHealth(
            HealthRequest(check_integrity=True), timeout=10
        )

    async def metrics(self) -> Samples:
        """Its page, at the address that its log has."""
        url = re.findall(r"^metrics at (\S+)$", self.log.read_text(), re.MULTILINE)[-1]
        async with httpx.AsyncClient(timeout=10) as client:
            return read((await client.get(url)).content)

    async def drain(self, deadline_s: float) -> list[DrainProgress]:
        """All that it says until it is done."""
        request = DrainRequest(deadline_ms=int(1000 * deadline_s))
        return [one async for one in WorkerStub(self.channel).Drain(request, timeout=30)]

    async def load(self) -> LoadReport:
        async with aclosing(self.loads()) as reports:
            return await anext(reports)

    async def loads(self, period_ms: int = 1000) -> AsyncGenerator[LoadReport, None]:
        """As they come, the first one at once."""
        wanted = SubscribeRequest(protocol=PROTOCOL, load_period_ms=period_ms)
        stream = WorkerEventsStub(self.channel).Subscribe(wanted, timeout=60)
        try:
            async for event in stream:
                yield event.load
        finally:
            stream.cancel()

    async def until(self, reached: Callable[[LoadReport], bool]) -> LoadReport:
        async with asyncio.timeout(30):
            while not reached(report := await self.load()):
                await asyncio.sleep(0.01)
        return report

    async def num_commits(self) -> float:
        """Of its leases, that were held to their end."""
        return value(await self.metrics(), "handoff_commits_total", verdict="held")

    async def until_lost(self, peer: int) -> None:
        """No link to that incarnation is left."""
        await self.until(lambda load: all(link.peer_incarnation != peer for link in load.links))

    async def leftovers(self) -> dict[str, int | str]:
        """What it has of requests, by name; nothing where none is under way."""
        return _left(await self.load())

    async def check_settled(self) -> None:
        """Nothing of any request is left, and all of its books add up."""
        deadline = time.monotonic() + SETTLED_S
        while (left := await self.leftovers()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert not left, f"{left} after {SETTLED_S} s"
        report = await self.health()
        assert report.healthy, report.reason


def _left(load: LoadReport) -> dict[str, int | str]:
    counts: dict[str, int | str] = {
        "leases": load.num_leases,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "fetching": load.num_fetching,
        "held": sum(blocks.held for blocks in load.blocks),
        "reserved": sum(blocks.reserved for blocks in load.blocks),
        "quarantined": sum(blocks.quarantined for blocks in load.blocks),
        "problem": load.unhealthy,
    }
    return {name: count for name, count in counts.items() if count}


def _only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@dataclass
class Relay:
    """Two prefill workers, one decode worker, and a client's session with it."""

    first: Worker
    second: Worker
    decode: Worker
    workers: tuple[Worker, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.workers = (self.first, self.second, self.decode)

    async def start(self) -> None:
        await asyncio.gather(*(worker.start() for worker in self.workers))
        await self.connect()

    async def connect(self) -> None:
        self.session = SessionBackend(self.decode.address, Plane())
        await self.session.start()

    async def reconnect(self) -> None:
        await self.session.stop()
        await self.connect()

    async def end(self) -> None:
        await self.session.stop()
        await asyncio.gather(*(worker.end() for worker in self.workers))

    async def ask(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *prefill: Worker | PrefillCandidate,
        local: LocalPrefill = LocalPrefill.NEVER,
        salt: str = "",
        timeout_s: float | None = None,
        shown: Answer | None = None,
        sources: Sequence[PrefixSource] = (),
    ) -> Answer:
        """The whole answer; every salt has a cache of its own. In `shown` it is as it comes."""
        name = RequestId(f"r{next(_serial)}")
        workers = prefill or (self.first, self.second)
        candidates = tuple(
            w if isinstance(w, PrefillCandidate) else PrefillCandidate(w.address) for w in workers
        )
        route = Route(candidates, tuple(sources), local)
        request = GenerationRequest(name, prompt, params, cache_salt=salt, timeout_s=timeout_s)
        stream = self.session.submit(request, route)
        answer = Answer() if shown is None else shown
        try:
            async with asyncio.timeout(60):
                async for update in stream:
                    answer.take(StepOutput({name: update}, {}), name)
        finally:
            stream.close()
        return answer

    async def mend(self) -> None:
        """A test that failed half-way leaves no fault to the next one."""
        for worker in self.workers:
            if worker.child.returncode is None:
                worker.go_on()
            else:
                await worker.restart()

    async def check_well(
        self, prompts: dict[str, list[int]], expected: dict[str, Answer], params: SamplingParams
    ) -> None:
        """All have settled, and the next twenty requests are answered as they should be."""
        for worker in self.workers:
            await worker.check_settled()
        shortest = min(prompts, key=lambda name: len(prompts[name]))
        names = [*prompts, *[shortest] * 20][:20]
        salts = [f"well {next(_serial)}" for _ in names]
        answers = await asyncio.gather(
            *(self.ask(prompts[n], params, salt=s) for n, s in zip(names, salts, strict=True))
        )
        for name, answer in zip(names, answers, strict=True):
            answer.check_equal(expected[name])
        for worker in self.workers:
            await worker.check_settled()


async def leave(*asked: asyncio.Future[Answer]) -> None:
    """As clients that hang up."""
    assert not any(one.done() for one in asked)
    for one in asked:
        one.cancel()
    await asyncio.wait(asked)


async def kill_readers(worker: Worker, counts: Sequence[int]) -> None:
    """So many at once of processes that read from its cache, each in the middle of a transfer."""
    connector = worker.connector

    async def described() -> WorkerDescription:
        """It expects somebody to connect now."""
        return await WorkerStub(worker.channel).Describe(DescribeRequest(protocol=PROTOCOL))

    told = await described()
    (metadata,) = [offer.metadata for offer in told.connectors if offer.name == connector]
    regions = PoolDescription.decode(metadata, connector, b"").regions
    shapes = [(region.num_blocks, region.blob_bytes) for region in regions]
    words = json.dumps([connector, shapes, told.incarnation, metadata.hex()])
    async with forked("tests.faults.doomed", words) as process:
        for count in counts:
            await described()
            process.stdin.write(f"{count}\n".encode())
            async with asyncio.timeout(60):
                while (line := await process.stdout.readline()) != b"killed\n":
                    assert line, "it ended"  # NIXL writes to standard output, too
        process.stdin.close()
        assert await process.wait() == 0


@asynccontextmanager
async def leased(
    worker: Worker, prompt: Sequence[int], params: SamplingParams, salt: str
) -> AsyncIterator[Hold]:
    """All of a prompt's blocks, offered to a puller that does not say whether it took them."""
    compute = Compute(params=encode_params(params), draw=True)
    stream = await _ask(worker, prompt, salt, compute)
    async for _ in _chunks(stream):
        pass
    yield stream
    stream.cancel()


async def held(worker: Worker, prompt: Sequence[int], params: SamplingParams, salt: str) -> bool:
    """Whether all of a prompt's blocks are, until a puller that waits for ever has read them."""
    async with leased(worker, prompt, params, salt) as stream:
        await stream.write(PullerMessage(commit=Commit()))
        message = await stream.read()
        assert isinstance(message, HolderMessage)
        return message.verdict.held


async def cached(worker: Worker, prompt: Sequence[int], salt: str) -> list[BlockRun]:
    """A prompt's blocks in its cache, with their checksums."""
    stream = await _ask(worker, prompt, salt)
    runs = [run async for chunk in _chunks(stream) for run in chunk.blocks]
    stream.cancel()
    return runs


async def _ask(
    worker: Worker, prompt: Sequence[int], salt: str, compute: Compute | None = None
) -> Hold:
    ask = Ask(
        protocol=PROTOCOL,
        handoff_id=salt,
        holder_incarnation=(await worker.load()).incarnation,
        token_ids=prompt,
        cache_salt=salt,
        compute=compute,
    )
    stream = HandOffStub(worker.channel).Open()
    await stream.write(PullerMessage(ask=ask))
    return stream


async def _chunks(stream: Hold) -> AsyncIterator[Chunk]:
    """All that is announced, to the end."""
    kind = ""
    while kind != "finished":
        message = await stream.read()
        assert isinstance(message, HolderMessage)
        kind = message.WhichOneof("kind") or ""
        assert kind in ("waiting", "chunk", "finished"), message
        if kind == "chunk":
            yield message.chunk
