"""A feed of a worker with an engine: what it tells, a router can count with."""

from pathlib import Path

import pytest

from engine.engine import Engine
from kv_cache.names import name_blocks, root_name
from protos.rpc import Plane
from router.ask import key_of
from router.subscriber import WorkerFeed
from router.worker_index import WorkerIndex
from router.workers import CacheShape, Load
from tests.decode_worker.worker_group import WorkerGroup
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import make_engine
from tests.engine.test_exact import random_prompts
from tests.waiting import until

PROMPT = random_prompts(1, 150, 150, seed=150)[0]


@pytest.mark.parametrize("model", ["llama", "gemma3"])
async def test_an_index_of_a_real_cache(tmp_path: Path, model: str) -> None:
    folder = str(make_tiny(model, tmp_path / model).folder)
    engine = make_engine(folder, max_num_batched_tokens=32, max_num_seqs=5, max_pause_s=0.12)
    group = await WorkerGroup.start([engine], [], "inprocess")
    (worker,) = group.decode
    limits, block_size = engine.limits, engine.info.shape.block_size
    whole = next(g for g, one in enumerate(engine.info.model.groups) if one.window is None)
    index, loads = WorkerIndex(CacheShape(block_size, 1, whole)), list[Load]()
    names = name_blocks(root_name(limits.fingerprint), PROMPT, block_size)
    keys = [key_of(name) for name in names]
    async with Plane().channel(group.addresses[worker]) as channel:
        feed = WorkerFeed("worker", channel, loads.append, index)
        await group.warm(worker, PROMPT)
        await until(lambda: index.match(keys, 0.0).num_held == len(PROMPT) // block_size)
        await worker.engine.ask(Engine.reset_prefix_cache)
        await until(lambda: index.match(keys, 0.0).num_held == 0)
        await feed.close()
    load = loads[-1]
    assert (load.max_sequences, load.max_step_tokens) == (5, 16)  # not 32, in 0.24 s
    assert load.max_model_len == limits.max_model_len
    assert load.num_total_tokens == index.capacity * block_size
    assert 0 < load.num_free_tokens <= load.num_total_tokens
    assert load.costs.prompt_token_s == 1e-2  # of `SlowSteps`
    await group.stop()
