"""The parts of an engine, made for one model in one shape."""

import threading
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.generation_defaults import GenerationDefaults
from engine.grammar.table import GrammarTable
from engine.memory import CachePlan
from engine.model_source import ModelSource
from engine.models.interface import CausalModel, ModelDescription
from engine.runner import ModelRunner
from engine.sampler.registry import load_sampler
from engine.sampler.table import SamplingTable
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.swap import SwapSpace
from engine.sizing import EngineShape
from engine.slots import SlotTable
from engine.touching import touch_in_background
from kv_cache.cache import KvCache
from kv_cache.config import CacheConfig
from kv_cache.events import new_incarnation
from kv_cache.names import cache_identity
from kv_cache.slab import KvSlab


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is, for those who route to it, report it or check that it fits."""

    source: ModelSource
    model: ModelDescription
    shape: EngineShape
    cache: CachePlan
    defaults: GenerationDefaults
    fingerprint: str


@dataclass(frozen=True)
class EngineParts:
    scheduler: Scheduler
    cache: KvCache
    slabs: tuple[KvSlab, ...]  # the cache's memory, one for each group
    runner: ModelRunner
    touching: threading.Thread  # of the slabs; runs until all of them are in memory
    closing: threading.Event  # ends it


def assemble(config: EngineConfig, info: EngineInfo, model: CausalModel) -> EngineParts:
    """Allocates the cache and has its memory touched in the background."""
    slabs = [
        KvSlab.allocate(layout, count, info.shape.device)
        for layout, count in zip(info.cache.layouts, info.cache.num_blocks, strict=True)
    ]
    host_slabs = _host_slabs(config, info)
    closing = threading.Event()
    touching = touch_in_background(slabs + host_slabs, closing)
    cache = _make_cache(config, info)
    swap = SwapSpace([s.num_blocks for s in host_slabs] or [0] * len(slabs))
    scheduler = Scheduler(_limits(config, info), cache, swap)
    runner = _make_runner(config, info, model, slabs, host_slabs)
    return EngineParts(scheduler, cache, tuple(slabs), runner, touching, closing)


def _make_cache(config: EngineConfig, info: EngineInfo) -> KvCache:
    return KvCache(
        CacheConfig(
            groups=info.model.groups,
            num_blocks=info.cache.num_blocks,
            block_size=info.shape.block_size,
            max_chunk_tokens=info.shape.chunk_tokens,
            eviction=config.eviction_policy,
            watermark=config.watermark,
            incarnation=new_incarnation(),
        )
    )


def _limits(config: EngineConfig, info: EngineInfo) -> SchedulerLimits:
    shape = info.shape
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_pause_s=config.max_pause_s,
        max_model_len=shape.max_model_len,
        max_num_queued_reqs=config.max_num_queued_reqs,
        by_priority=config.scheduling_policy == "priority",
        max_overtake_s=config.max_overtake_s if config.scheduling_policy == "shortest" else None,
        prefix_caching=config.enable_prefix_caching,
        vocab_size=info.model.vocab_size,
        eos_token_ids=frozenset(info.defaults.eos_token_ids),
        fingerprint=cache_identity(info.fingerprint, shape.kv_format.name, shape.block_size),
    )


def _make_runner(
    config: EngineConfig,
    info: EngineInfo,
    model: CausalModel,
    slabs: list[KvSlab],
    host_slabs: list[KvSlab],
) -> ModelRunner:
    shape = info.shape
    parameters = SamplingTable(config.max_num_seqs, info.model.vocab_size)
    slots = SlotTable(config.max_num_seqs, shape.max_model_len, shape.block_size, len(slabs))
    sampler = load_sampler(config.kernels, shape.device, parameters)
    eos = info.defaults.eos_below(info.model.vocab_size)
    grammars = GrammarTable(info.model.vocab_size, eos)
    return ModelRunner(model, sampler, parameters, slots, grammars, slabs, host_slabs, eos)


def _host_slabs(config: EngineConfig, info: EngineInfo) -> list[KvSlab]:
    """Swap space in the ratio of the groups' own blocks; none without swapping."""
    if config.preemption_mode != "swap":
        return []
    plan, pinned = info.cache, info.shape.device.type == "cuda"
    share = config.swap_space_bytes / plan.num_bytes
    return [
        KvSlab.allocate(layout, max(1, int(count * share)), torch.device("cpu"), pinned)
        for layout, count in zip(plan.layouts, plan.num_blocks, strict=True)
    ]
