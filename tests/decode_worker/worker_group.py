"""Several workers of both pools in one process, which have prefixes of each other's prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from decode_worker.answerer import (
    LocalPrefill,
    PrefillCandidate,
    PrefixSource,
    Route,
    SubmittedRequest,
)
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.request import ChoiceSoFar, GenerationRequest, RequestId
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from engine.step_times import StepCosts, StepShape, StepTimes
from kv_transfer.config import ExchangeConfig
from kv_transfer.faults import Faults
from prefill_worker.node import Node, NodeConfig
from protos.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.decode_worker.reading import updates
from tests.decode_worker.worker_pair import is_busy
from tests.engine.pair import Answer

_serial = count()


class SlowSteps(StepTimes):
    """Of an engine for which pulling is worth its while: a token takes so long."""

    token_s = 1e-2

    def predict(self, shape: StepShape) -> float:
        return shape.num_prompt_tokens * self.token_s

    @property
    def costs(self) -> StepCosts:
        return StepCosts(0.0, self.token_s, 0.0, 0.0, 0.0)


@dataclass
class WorkerGroup:
    decode: list[DecodeWorker] = field(default_factory=list)
    prefill: list[Node] = field(default_factory=list)
    addresses: dict[Node, str] = field(default_factory=dict)

    @property
    def workers(self) -> list[Node]:
        return [*self.decode, *self.prefill]

    @classmethod
    async def start(
        cls,
        decode: Sequence[Engine],
        prefill: Sequence[Engine],
        connector: str,
        faults: str = "",  # of the first one that answers
        max_leases: int = ExchangeConfig.max_leases,
    ) -> "WorkerGroup":
        group = cls()
        exchange = ExchangeConfig(checksums=True, max_leases=max_leases)
        for engine in decode:
            config = NodeConfig(role=ROLE_DECODE, connectors=(connector,), exchange=exchange)
            given = Faults("" if group.decode else faults)
            group.decode.append(DecodeWorker(config, engine, given))
        for engine in prefill:
            config = NodeConfig(role=ROLE_PREFILL, connectors=(connector,), exchange=exchange)
            group.prefill.append(Node(config, engine, Faults()))
        for worker in group.workers:
            worker.engine.engine.step_times = SlowSteps()
            await worker.start()
            group.addresses[worker] = await worker.serve()
        return group

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.stop()

    def has(self, worker: Node, num_tokens: int) -> PrefixSource:
        return PrefixSource(self.addresses[worker], worker.incarnation, num_tokens)

    async def warm(self, worker: Node, prompt: list[int]) -> None:
        """Afterwards it has computed and cached the prompt."""
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        stream = worker.engine.submit(GenerationRequest(_name(), prompt, params))
        async for _ in stream:
            pass
        stream.close()

    async def ask(
        self,
        prompt: list[int],
        params: SamplingParams,
        sources: Sequence[PrefixSource] = (),
        by: int = 0,
        computed_by: Sequence[Node | str] = (),  # workers or addresses
        local: LocalPrefill = LocalPrefill.AUTO,
        sent: tuple[ChoiceSoFar, ...] = (),
    ) -> Answer:
        name = _name()
        at = [w if isinstance(w, str) else self.addresses[w] for w in computed_by]
        candidates = tuple(PrefillCandidate(address) for address in at)
        request = GenerationRequest(name, prompt, params, timeout_s=30.0, sent=sent)
        submitted = SubmittedRequest(request, Route(candidates, tuple(sources), local))
        stream = self.decode[by].answerer.submit(submitted)
        answer = Answer()
        try:
            async with asyncio.timeout(30):
                async for update in updates(stream):
                    answer.take(StepOutput({name: update}, {}), name)
        finally:
            stream.close()
        return answer

    async def forget(self) -> None:
        for worker in self.workers:
            await worker.engine.ask(Engine.reset_prefix_cache)

    async def check_idle(self) -> None:
        async with asyncio.timeout(30):
            for worker in self.workers:
                while worker.num_leases or worker.fetcher.num_running:
                    await asyncio.sleep(0.001)
                while await worker.engine.ask(is_busy):
                    await asyncio.sleep(0.001)
                await worker.engine.ask(Engine.check_integrity)


def _name() -> RequestId:
    return RequestId(f"g{next(_serial)}")
