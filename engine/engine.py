"""One model on one device, serving many requests step by step."""

import logging
import time
from dataclasses import replace

import torch

from engine.assemble import EngineInfo, EngineParts, assemble
from engine.config import EngineConfig
from engine.errors import EngineError, StepError
from engine.fingerprint import fingerprint
from engine.generation_defaults import read_generation_defaults
from engine.kernels.registry import load_kernels
from engine.machine import available_memory
from engine.memory import format_bytes
from engine.model_source import ModelSource, resolve_model
from engine.models.describe import describe
from engine.models.interface import CausalModel, LoadFormat, ModelDescription
from engine.models.load import load_model
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from engine.scheduler.scheduler import SchedulerStats
from engine.sizing import EngineShape, decide_shape, size_cache
from kv_cache.cache import CacheStats

logger = logging.getLogger(__name__)


class Engine:
    """Scheduler, cache and runner of one model; one thread calls it.

    `add` and `abort` between steps, `step` while `has_work`. A step that fails ends the
    requests in it and leaves the others as they are.
    """

    def __init__(self, info: EngineInfo, parts: EngineParts, seed: int) -> None:
        self.info = info
        self._scheduler = parts.scheduler
        self._cache = parts.cache
        self._runner = parts.runner
        self._closing = parts.closing
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
        engine = cls(info, assemble(config, info, loaded), config.seed)
        _report(info)
        logger.info("warming up; what is to be compiled is compiled on a machine's first start")
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
        self._cache.events.flush()

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
                SamplingParams(
                    max_tokens=num_tokens,
                    ignore_eos=True,
                    temperature=0.0,
                    logprobs=1,  # reporting has kernels of its own
                    prompt_logprobs=1,
                ),
            )
        )
        while self.has_work:
            failures = self.step().failures
            if failures:
                raise failures[RequestId("warm-up")]
        self.reset_prefix_cache()

    def close(self) -> None:
        """Nothing of ours touches the cache's memory from here on but a last piece of it."""
        self._closing.set()


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
