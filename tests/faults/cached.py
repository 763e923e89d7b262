"""What a worker itself says that it holds, beside what a router believes."""

import time
from collections.abc import Iterable, Sequence

from kv_cache.names import BlockName
from kv_transfer.event_messages import decode_part
from protos.events_pb2 import SubscribeRequest
from protos.events_pb2_grpc import WorkerEventsStub
from protos.rpc import PROTOCOL
from router.ask import key_of
from router.worker_index import WorkerIndex
from tests.faults.workers import Worker


async def snapshot(worker: Worker) -> list[list[BlockName]]:
    """Every chain of blocks in its cache, from the first to one that none follows."""
    parents: dict[BlockName, BlockName | None] = {}
    wanted = SubscribeRequest(protocol=PROTOCOL, cache_events=True)
    stream = WorkerEventsStub(worker.channel).Subscribe(wanted, timeout=10)
    async for event in stream:
        parents.update((one.name, one.parent) for one in decode_part(event.snapshot).stored)
        if event.snapshot.complete:
            break
    stream.cancel()
    return [_chain(parents, last) for last in parents.keys() - parents.values()]


async def names(worker: Worker) -> set[BlockName]:
    return {name for chain in await snapshot(worker) for name in chain}


def _chain(parents: dict[BlockName, BlockName | None], last: BlockName) -> list[BlockName]:
    chain: list[BlockName] = []
    name: BlockName | None = last
    while name is not None:
        chain.insert(0, name)
        name = parents[name]
    return chain


def is_held(index: WorkerIndex, chains: Iterable[Sequence[BlockName]]) -> bool:
    """Whether it knows of these blocks, and of no others."""
    now = time.monotonic()
    names = {name for chain in chains for name in chain}
    found = (index.match([key_of(name) for name in chain], now).num_held for chain in chains)
    return len(index) == len(names) and list(found) == [len(chain) for chain in chains]
