"""Two pools of `kvrelay worker` processes, and an ingress's way to them in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any

from cluster.pools import Pools
from cluster.published import metadata_of
from cluster.relay import Relay, RelayConfig
from decode_worker.answerer import LocalPrefill
from engine.engine import Engine
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from protos.rpc import PROTOCOL, Plane
from protos.worker_pb2 import DescribeRequest
from protos.worker_pb2_grpc import WorkerStub
from router.config import RouterConfig
from router.router import Router
from router.workers import Leg
from router.workers import Worker as RoutedWorker
from tests.engine.pair import Answer
from tests.faults.workers import Worker

RELEASE = "the only one"
READY_S = 60.0
ANSWERED_S = 120.0  # for a wave, with workers that start meanwhile
_serial = count()


class Fleet:
    """Workers that die are started again by `mend`; every ingress is told who is there."""

    def __init__(self, prefill: Sequence[Worker], decode: Sequence[Worker]) -> None:
        self.pools = {Leg.PREFILL: list(prefill), Leg.DECODE: list(decode)}
        self._known: dict[Worker, RoutedWorker] = {}
        self._ingresses: list[Pools] = []

    @property
    def prefill(self) -> list[Worker]:
        return self.pools[Leg.PREFILL]

    @property
    def decode(self) -> list[Worker]:
        return self.pools[Leg.DECODE]

    @property
    def living(self) -> list[Worker]:
        every = [*self.prefill, *self.decode]
        return [worker for worker in every if worker.child.returncode is None]

    async def start(self) -> None:
        """Two at a time, as there are cores to be had where tests run."""
        for pool in self.pools.values():
            await asyncio.gather(*(self._started(one) for one in pool))

    async def add(self, leg: Leg, worker: Worker) -> None:
        await self._started(worker)
        self.pools[leg].append(worker)
        self._publish()

    def meet(self, other: Fleet) -> None:
        """Its ingresses are told of the other's workers, too."""
        for leg, workers in other.pools.items():
            self.pools[leg] += workers
        self._known |= other._known
        self._publish()

    async def mend(self, leg: Leg | None = None) -> None:
        """All that a test before may have left; `leg`: of these alone the dead ones."""
        for worker in self.living:
            worker.go_on()
        dead = [one for pool in self.pools for one in self.pools[pool] if leg in (None, pool)]
        dead = [one for one in dead if one.child.returncode is not None]
        await asyncio.gather(*(self._restarted(worker) for worker in dead))
        self._publish()

    async def end(self) -> None:
        every = [*self.prefill, *self.decode]
        await asyncio.gather(*(worker.end() for worker in every))

    async def check_settled(self) -> None:
        for worker in self.living:
            await worker.check_settled()

    def known(self, worker: Worker) -> RoutedWorker:
        """As routers know it."""
        return self._known[worker]

    def busiest(self, relay: Relay) -> Worker:
        """The decode worker with the most open streams of this ingress: which one that is, is the
        router's choice and the machine's."""

        def num_open(worker: Worker) -> int:
            session = relay.pools.session_of(self.known(worker))
            return session.num_open if session else 0

        return max(self.decode, key=num_open)

    @asynccontextmanager
    async def ingress(
        self, config: RelayConfig | None = None, plane: Plane | None = None
    ) -> AsyncIterator[Relay]:
        """Ready when it knows all workers that live; leaves nothing at any of them."""
        config = config or RelayConfig()
        may_stay = config.local_prefill is not LocalPrefill.NEVER
        router = Router(RouterConfig(may_stay=may_stay), Random(0))
        pools = Pools(plane or Plane(), RELEASE, router)
        relay = Relay(pools, config)
        self._ingresses.append(pools)
        try:
            self._publish()
            async with asyncio.timeout(READY_S):
                await pools.first_description()
            await until(lambda: len(_usable(pools)) == len(self.living), READY_S)
            yield relay
            assert relay.router.num_under_way == relay.router.num_waiting == 0
        finally:
            self._ingresses.remove(pools)
            await pools.close()

    async def _started(self, worker: Worker) -> None:
        await worker.start()
        told = await WorkerStub(worker.channel).Describe(DescribeRequest(protocol=PROTOCOL))
        self._known[worker] = RoutedWorker(
            worker.address, told.incarnation, told.format.fingerprint
        )

    async def _restarted(self, worker: Worker) -> None:
        """At another address, as Serve's replicas."""
        worker.set_faults("")
        await worker.end()
        worker.address = ""
        await self._started(worker)

    def _publish(self) -> None:
        for pools in self._ingresses:
            for leg, workers in self.pools.items():
                known = [self._known[one] for one in workers if one.child.returncode is None]
                pools.update(leg, {str(one): metadata_of(one, RELEASE) for one in known})


def _usable(pools: Pools) -> list[RoutedWorker]:
    return [worker for leg in Leg for worker in pools.usable(leg)]


async def until(condition: Any, within_s: float) -> float:
    """How long it took."""
    began = time.monotonic()
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
    return time.monotonic() - began


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    params: SamplingParams


def undisturbed(engine: Engine, jobs: Mapping[str, Job]) -> dict[str, Answer]:
    """What one engine says that does nothing else."""
    for name, job in jobs.items():
        engine.add(GenerationRequest(RequestId(name), job.prompt, job.params))
    answers = {name: Answer() for name in jobs}
    while engine.has_work:
        output = engine.step()
        for name, answer in answers.items():
            answer.take(output, name)
    return answers


@dataclass
class Wave:
    """One stream for every job, all at once; what is cached of other waves helps none of them."""

    relay: Relay
    jobs: Mapping[str, Job]
    salt: str = field(default_factory=lambda: f"wave {next(_serial)}")
    answers: dict[str, Answer] = field(default_factory=dict)
    longest_pause_s: float = 0.0  # of a stream that had begun

    def __post_init__(self) -> None:
        self._tasks = [asyncio.ensure_future(self._ask(name)) for name in self.jobs]

    async def _ask(self, name: str) -> None:
        job, answer = self.jobs[name], Answer()
        self.answers[name] = answer
        request_id = RequestId(f"{name} of {self.salt}")
        request = GenerationRequest(request_id, job.prompt, job.params, cache_salt=self.salt)
        stream = self.relay.submit(replace(request, timeout_s=ANSWERED_S))
        came = None
        try:
            async for update in stream:
                now = time.monotonic()
                self.longest_pause_s = max(self.longest_pause_s, now - (came or now))
                came = now
                answer.take(StepOutput({request_id: update}, {}), request_id)
        finally:
            stream.close()

    async def reach(self, num_tokens: int) -> None:
        """Until every stream has so many tokens."""

        def num_least() -> int:
            return min(len(self.answers[name].tokens.get(0, ())) for name in self.jobs)

        await asyncio.sleep(0)  # until they have been asked
        await until(lambda: num_least() >= num_tokens or self._failed(), ANSWERED_S)

    def _failed(self) -> bool:
        return any(task.done() and task.exception() is not None for task in self._tasks)

    async def finished(self) -> None:
        try:
            async with asyncio.timeout(ANSWERED_S):
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()

    async def check(self, expected: Mapping[str, Answer]) -> None:
        """Token by token, and with their logprobs."""
        await self.finished()
        for name, answer in self.answers.items():
            answer.check_equal(expected[name])
