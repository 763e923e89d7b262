"""Our engine under measure, with the settings a user gets."""

import logging
from collections.abc import Sequence
from importlib.metadata import version

import torch

from benchmarks.child import SideInfo, arguments, serve
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from kv_cache.slab import KvSlab


class KvrelaySide:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._serial = 0
        self._indices: dict[RequestId, int] = {}

    def add(self, index: int, prompt: list[int], num_output: int) -> None:
        self._serial += 1
        request_id = RequestId(str(self._serial))
        self._indices[request_id] = index
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        self._engine.add(GenerationRequest(request_id, prompt, params))

    def step(self) -> dict[int, int]:
        output = self._engine.step()
        for failure in output.failures.values():
            raise failure
        return {
            self._indices[request_id]: sum(len(delta.token_ids) for delta in update.deltas)
            for request_id, update in output.updates.items()
        }


def settle(slabs: Sequence[KvSlab]) -> None:
    """Has all of the cache in memory, since what is measured leaves its size out; nothing is
    cached yet."""
    for slab in slabs:
        if not slab.touch():  # which not every system can
            slab.data.view(torch.uint8).zero_()


def start() -> tuple[KvrelaySide, SideInfo]:
    args = arguments()
    logging.basicConfig(level=logging.INFO)
    engine = Engine.create(EngineConfig(model=args.model, kv_cache_memory_bytes=args.kv_bytes))
    if args.settled:
        engine.touching.join()
        settle(engine.slabs)
    info = engine.info
    weights = info.model.num_parameters * info.shape.dtype.itemsize
    return KvrelaySide(engine), SideInfo(version("kvrelay"), weights, info.cache.num_bytes)


if __name__ == "__main__":
    serve(start)
