"""One model on one device, serving many requests step by step."""

import logging
import secrets
import threading
import time
from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError, StepError
from engine.fingerprint import fingerprint
from engine.generation_defaults import GenerationDefaults, read_generation_defaults
from engine.kernels.registry import load_kernels
from engine.machine import available_memory
from engine.memory import CachePlan, format_bytes
from engine.model_source import ModelSource, resolve_model
from engine.models.describe import describe
from engine.models.interface import CausalModel, LoadFormat, ModelDescription
from engine.models.load import load_model
from engine.request import GenerationRequest, RequestId
from engine.runner import ModelRunner
from engine.sampler.registry import load_sampler
from engine.sampler.table import SamplingTable
from engine.sampling import SamplingParams
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.outbox import StepOutput
from engine.scheduler.scheduler import Scheduler, SchedulerStats
from engine.scheduler.swap import SwapSpace
from engine.sizing import EngineShape, decide_shape, size_cache
from engine.slots import SlotTable
from kv_cache.cache import CacheStats, KvCache
from kv_cache.config import CacheConfig
from kv_cache.slab import KvSlab

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is, for those who route to it, report it or check that it fits."""

    source: ModelSource
    model: ModelDescription
    shape: EngineShape
    cache: CachePlan
    defaults: GenerationDefaults
    fingerprint: str


class Engine:
    """Scheduler, cache and runner of one model; one thread calls it.

    `add` and `abort` between steps, `step` while `has_work`. A step that fails ends the
    requests in it and leaves the others as they are.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        cache: KvCache,
        runner: ModelRunner,
        seed: int,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._seeds = torch.Generator().manual_seed(seed)
        self.num_steps = 0

    @classmethod
    def create(cls, config: EngineConfig) -> "Engine":
        """Loads the model, sizes the cache, and compiles what is compiled on first use."""
        started = time.monotonic()
        source = resolve_model(
            config.model,
            config.revision,
            config.download_dir,
            weights=config.load_format != "dummy",
        )
        model = describe(source)
        shape = decide_shape(config, model)
        torch.set_num_threads(shape.num_threads)
        model = replace(model, max_model_len=shape.max_model_len)
        loaded = _load(config, source, model, shape)
        plan = size_cache(config, shape, model)
        info = EngineInfo(
            source=source,
            model=model,
            shape=shape,
            cache=plan,
            defaults=read_generation_defaults(source.folder),
            fingerprint=fingerprint(source, _load_format(config), config.seed, model.variant),
        )
        engine = cls(info, *_assemble(config, info, loaded), config.seed)
        _report(info)
        engine.warm_up()
        logger.info("ready after %.1f s", time.monotonic() - started)
        return engine

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, request: GenerationRequest) -> None:
        """RequestError for what can never run, QueueFullError for what could run later."""
        seed = int(torch.randint(-(2**63), 2**63 - 1, (), generator=self._seeds))
        self._scheduler.add(request, seed)

    def abort(self, request_id: RequestId) -> None:
        self._scheduler.abort(request_id)

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self._scheduler.stop_choice(request_id, choice)

    def step(self) -> StepOutput:
        """Computes one step of what there is; empty when nothing can be computed now."""
        step = self._scheduler.schedule()
        if step is None:
            return StepOutput({}, {})
        try:
            result = self._runner.execute(step.plan)
        except Exception as error:  # noqa: BLE001 - whatever it is, only this step's requests end
            logger.exception("step %d failed", step.plan.step)
            return self._scheduler.fail(step, _as_step_error(error))
        finally:
            self.num_steps += 1
        return self._scheduler.complete(step, result)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached block that no sequence holds."""
        self._cache.reset()

    def scheduler_stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def cache_stats(self) -> CacheStats:
        return self._cache.stats()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def warm_up(self) -> None:
        """A prompt of some blocks and a few tokens, so that no user waits for a compiler."""
        shape = self.info.shape
        length = min(4 * shape.block_size + 1, max(1, shape.max_model_len - 2))
        num_tokens = min(2, shape.max_model_len - length)
        self.add(
            GenerationRequest(
                RequestId("warm-up"),
                [0] * length,
                SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0),
            )
        )
        while self.has_work:
            failures = self.step().failures
            if failures:
                raise failures[RequestId("warm-up")]
        self._cache.reset()


def _as_step_error(error: Exception) -> EngineError:
    return error if isinstance(error, EngineError) else StepError(f"the step failed: {error!r}")


def _load(
    config: EngineConfig, source: ModelSource, model: ModelDescription, shape: EngineShape
) -> CausalModel:
    kernels = load_kernels(config.kernels, shape.device)
    logger.info(
        "loading %s: %s, %.1f M parameters in %s on %s",
        source.name,
        model.architecture,
        model.num_parameters / 1e6,
        shape.dtype,
        shape.device,
    )
    return load_model(
        source, model, kernels, shape.dtype, shape.device, _load_format(config), config.seed
    )


def _load_format(config: EngineConfig) -> LoadFormat:
    return "dummy" if config.load_format == "dummy" else "auto"


def _assemble(
    config: EngineConfig, info: EngineInfo, model: CausalModel
) -> tuple[Scheduler, KvCache, ModelRunner]:
    shape, plan = info.shape, info.cache
    cache = KvCache(
        CacheConfig(
            groups=info.model.groups,
            num_blocks=plan.num_blocks,
            block_size=shape.block_size,
            max_chunk_tokens=shape.chunk_tokens,
            eviction=config.eviction_policy,
            watermark=config.watermark,
            incarnation=secrets.randbits(63),
        )
    )
    slabs = [
        KvSlab.allocate(layout, count, shape.device)
        for layout, count in zip(plan.layouts, plan.num_blocks, strict=True)
    ]
    host_slabs = _host_slabs(config, plan)
    _touch_in_background(slabs + host_slabs)
    eos = info.defaults.eos_token_ids
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=shape.max_model_len,
        max_num_queued_reqs=config.max_num_queued_reqs,
        by_priority=config.scheduling_policy == "priority",
        prefix_caching=config.enable_prefix_caching,
        vocab_size=info.model.vocab_size,
        eos_token_ids=frozenset(eos),
        fingerprint=f"{info.fingerprint}/{shape.kv_format.name}/{shape.block_size}",
    )
    swap = SwapSpace([s.num_blocks for s in host_slabs] or [0] * len(slabs))
    scheduler = Scheduler(limits, cache, swap)
    parameters = SamplingTable(config.max_num_seqs, info.model.vocab_size)
    slots = SlotTable(config.max_num_seqs, shape.max_model_len, shape.block_size, len(slabs))
    sampler = load_sampler(config.kernels, shape.device, parameters)
    runner = ModelRunner(model, sampler, parameters, slots, slabs, host_slabs, eos)
    return scheduler, cache, runner


def _host_slabs(config: EngineConfig, plan: CachePlan) -> list[KvSlab]:
    """Swap space in the ratio of the groups' own blocks; none without swapping."""
    if config.preemption_mode != "swap":
        return []
    if config.swap_space_bytes > available_memory():
        raise ConfigError(
            "swap_space_bytes",
            f"{format_bytes(config.swap_space_bytes)}, and"
            f" {format_bytes(available_memory())} are available",
        )
    share = config.swap_space_bytes / plan.num_bytes
    return [
        KvSlab.allocate(layout, max(1, int(count * share)), torch.device("cpu"))
        for layout, count in zip(plan.layouts, plan.num_blocks, strict=True)
    ]


def _touch_in_background(slabs: list[KvSlab]) -> None:
    """From the start on, since the first touch of memory may be slower than a prompt."""

    def touch() -> None:
        started = time.monotonic()
        if all(slab.touch() for slab in slabs):
            size = sum(slab.data.nbytes for slab in slabs)
            logger.info(
                "%s of cache touched in %.1f s", format_bytes(size), time.monotonic() - started
            )

    threading.Thread(target=touch, name="touch-cache", daemon=True).start()


def _report(info: EngineInfo) -> None:
    plan, shape = info.cache, info.shape
    weights = info.model.num_parameters * shape.dtype.itemsize
    logger.info(
        "weights %s, cache %s, %s of memory still available",
        format_bytes(weights),
        format_bytes(plan.num_bytes),
        format_bytes(available_memory()),
    )
    logger.info(
        "the cache holds %d tokens in blocks of %d: %d sequences of %d tokens at once",
        plan.num_tokens,
        shape.block_size,
        plan.num_sequences(shape.max_model_len),
        shape.max_model_len,
    )
