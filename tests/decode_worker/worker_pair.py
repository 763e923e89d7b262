"""A prefill and a decode worker in one process, spoken to where a session would."""

import asyncio
from dataclasses import dataclass, field
from itertools import count

from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route, SubmittedRequest
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.request import ChoiceSoFar, GenerationRequest, RequestId
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from kv_transfer.config import ExchangeConfig
from kv_transfer.faults import Faults
from prefill_worker.node import Node, NodeConfig
from protos.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.decode_worker.reading import updates
from tests.engine.pair import Answer

_serial = count()


@dataclass
class WorkerPair:
    prefill: Node
    decode: DecodeWorker
    addresses: list[str] = field(default_factory=list)  # of prefill workers
    decode_address: str = ""

    @classmethod
    async def start(
        cls, prefill: Engine, decode: Engine, connectors: tuple[str, ...], faults: str = ""
    ) -> "WorkerPair":
        common = {"connectors": connectors, "exchange": ExchangeConfig(checksums=True)}
        pair = cls(
            Node(NodeConfig(role=ROLE_PREFILL, **common), prefill, Faults(faults)),  # type: ignore[arg-type]
            DecodeWorker(NodeConfig(role=ROLE_DECODE, **common), decode, Faults(faults)),  # type: ignore[arg-type]
        )
        for worker in (pair.prefill, pair.decode):
            await worker.start()
        pair.addresses = [await pair.prefill.serve()]
        pair.decode_address = await pair.decode.serve()
        return pair

    async def stop(self) -> None:
        await self.decode.stop()
        await self.prefill.stop()

    async def ask(
        self,
        prompt: list[int],
        params: SamplingParams,
        local: LocalPrefill = LocalPrefill.NEVER,
        sent: tuple[ChoiceSoFar, ...] = (),
    ) -> Answer:
        name = RequestId(f"r{next(_serial)}")
        request = GenerationRequest(name, prompt, params, sent=sent)
        candidates = tuple(PrefillCandidate(address) for address in self.addresses)
        stream = self.decode.answerer.submit(
            SubmittedRequest(request, Route(candidates, (), local))
        )
        answer = Answer()
        try:
            async with asyncio.timeout(30):
                async for update in updates(stream):
                    answer.take(StepOutput({name: update}, {}), name)
        finally:
            stream.close()
        return answer

    async def forget(self, *workers: Node) -> None:
        for worker in workers:
            await worker.engine.ask(Engine.reset_prefix_cache)

    async def check_idle(self) -> None:
        """Nothing is left of any request: no lease, no hold, no block that somebody has."""
        async with asyncio.timeout(30):
            for worker in (self.decode, self.prefill):
                while worker.num_leases or worker.fetcher.num_running:
                    await asyncio.sleep(0.001)
                while await worker.engine.ask(is_busy):
                    await asyncio.sleep(0.001)
                await worker.engine.ask(Engine.check_integrity)


def is_busy(engine: Engine) -> bool:
    held = any(group.held or group.quarantined for group in engine.cache_stats().groups)
    return held or engine.has_work or engine.num_transfers > 0
