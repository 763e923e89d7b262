"""What the configuration leaves open, decided from the model and the machine."""

import math
from bisect import bisect
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.interface import Kernels
from engine.machine import available_memory, num_cpus
from engine.memory import CachePlan, bytes_needed, format_bytes, plan_cache
from engine.models.interface import ModelDescription
from engine.slots import slot_bytes
from engine.step_memory import step_bytes
from kv_cache.layout import KV_FORMATS, BlockLayout, KvFormat

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FORMAT_NAMES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8": "int8",
}

GPU_MEMORY_UTILIZATION = 0.9
DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
# A CPU's cache is modest unless asked for: its pages are slow to come the first time, and the
# machine has other work. It grows for one longest sequence, up to that share of what weights leave.
CPU_CACHE_BYTES = 512 << 20
CPU_CACHE_SHARE = 0.25


class Memory(NamedTuple):
    """Of the device that a model is to run on."""

    available_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class EngineShape:
    """The decisions: everything that is sized, and how steps follow each other."""

    device: torch.device
    dtype: torch.dtype
    kv_format: KvFormat
    num_threads: int
    block_size: int
    max_model_len: int
    chunk_tokens: int
    async_scheduling: bool

    @property
    def dtype_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype is self.dtype)


def decide_shape(
    config: EngineConfig, model: ModelDescription, device: torch.device | None = None
) -> EngineShape:
    """`device`: instead of the one found here, where plans are made for another machine."""
    device = device or find_device(config)
    if device.type != "cuda" and config.gpu_memory_utilization is not None:
        raise ConfigError(
            "gpu_memory_utilization",
            f"{config.gpu_memory_utilization}, and the device is {device.type}, whose cache"
            " kv_cache_memory_bytes sizes",
        )
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    kv_dtype = dtype if config.kv_cache_format == "auto" else config.kv_cache_format
    if kv_dtype in DTYPES and kv_dtype != dtype:
        quantised = ", ".join(name for name in FORMAT_NAMES if name not in DTYPES)
        raise ConfigError(
            "kv_cache_dtype", f"{kv_dtype!r}, must be the model's {dtype!r} or one of {quantised}"
        )
    max_model_len = model.length_for(config.max_model_len)
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            "max_num_batched_tokens",
            f"{config.max_num_batched_tokens}, must be at least max_num_seqs,"
            f" {config.max_num_seqs}",
        )
    return EngineShape(
        device=device,
        dtype=DTYPES[dtype],
        kv_format=KV_FORMATS[FORMAT_NAMES[kv_dtype]],
        num_threads=config.num_threads or num_cpus(),
        block_size=config.block_size or DEFAULT_BLOCK_SIZE[device.type],
        max_model_len=max_model_len,
        chunk_tokens=min(config.max_num_batched_tokens, max_model_len),
        async_scheduling=_async_scheduling(config, device),
    )


def _async_scheduling(config: EngineConfig, device: torch.device) -> bool:
    """On a CPU host and model share the cores, so there is nothing to hide."""
    if config.async_scheduling is None:
        return device.type != "cpu"
    return config.async_scheduling


def find_device(config: EngineConfig) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "'cuda', and torch sees no such device here")
    return torch.device(name)


def memory_of(device: torch.device) -> Memory:
    if device.type == "cuda":
        return Memory(*torch.cuda.mem_get_info(device))
    available = available_memory()
    return Memory(available, available)


def weight_bytes(model: ModelDescription, dtype: torch.dtype, kernels: Kernels) -> int:
    return model.weight_bytes(dtype.itemsize, kernels.copies_tied(dtype))


def gpu_step_bytes(config: EngineConfig, shape: EngineShape, model: ModelDescription) -> int:
    return step_bytes(
        model, shape.dtype.itemsize, config.max_num_batched_tokens, config.max_num_seqs
    )


def gpu_cache_bytes(
    config: EngineConfig,
    shape: EngineShape,
    model: ModelDescription,
    memory: Memory,
    to_load_bytes: int = 0,
) -> int:
    """What the share leaves beside weights and steps: of one too small, less than nothing."""
    used = memory.total_bytes - memory.available_bytes + to_load_bytes
    share = int(memory.total_bytes * gpu_share(config))
    return share - used - gpu_step_bytes(config, shape, model)


def gpu_share(config: EngineConfig) -> float:
    return config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION  # it is never 0


def cpu_cache_bytes(shape: EngineShape, model: ModelDescription, left: int) -> int:
    """Of what the weights leave."""
    return min(max(_least(shape, model), CPU_CACHE_BYTES), int(left * CPU_CACHE_SHARE))


def size_cache(
    config: EngineConfig,
    shape: EngineShape,
    model: ModelDescription,
    memory: Memory,
    to_load_bytes: int = 0,
) -> CachePlan:
    """Of what the device has left with the weights loaded. Before that `to_load_bytes` are still
    theirs, so that what cannot be served is refused before anybody has waited for it."""
    left = memory.available_bytes - to_load_bytes
    if left <= 0:
        raise ConfigError("model", _no_room(shape, model, memory.available_bytes, to_load_bytes))
    on_gpu = shape.device.type == "cuda"
    steps = gpu_step_bytes(config, shape, model) if on_gpu else 0
    left -= steps
    budget = config.kv_cache_memory_bytes
    if budget is not None:
        if budget > left:
            raise ConfigError(
                "kv_cache_memory_bytes",
                f"{format_bytes(budget)}, and {format_bytes(max(left, 0))} are available"
                f"{_beside(to_load_bytes, steps)}",
            )
    elif on_gpu:
        budget = gpu_cache_bytes(config, shape, model, memory, to_load_bytes)
        if budget <= 0:
            least = _least(shape, model)
            raise ConfigError("gpu_memory_utilization", _too_small(config, memory, left, least))
    else:
        budget = cpu_cache_bytes(shape, model, left)
    return _plan(shape, model, budget, left)


def check_cache(config: EngineConfig, shape: EngineShape, model: ModelDescription) -> None:
    """That a size which was said holds a sequence of the longest, whatever the device has."""
    if config.kv_cache_memory_bytes is not None:
        _plan(shape, model, config.kv_cache_memory_bytes)


def _plan(
    shape: EngineShape, model: ModelDescription, budget: int, most: int | None = None
) -> CachePlan:
    return plan_cache(
        model.groups,
        shape.kv_format,
        shape.block_size,
        budget,
        shape.max_model_len,
        shape.chunk_tokens,
        most,
    )


def check_host(
    config: EngineConfig,
    shape: EngineShape,
    model: ModelDescription,
    plan: CachePlan,
    available_bytes: int,
    to_load_bytes: int = 0,
) -> None:
    """What is needed of the host beside weights and cache that stay there: tables as long as the
    longest sequence, the space of swapped ones, and weights on their way to a GPU, of a model
    that transformers loads."""
    stays = shape.device.type == "cpu"
    if not model.native and to_load_bytes > available_bytes:
        raise ConfigError("model", _no_way(shape, to_load_bytes, available_bytes))
    left = max(available_bytes - stays * (to_load_bytes + plan.num_bytes), 0)
    left -= _fitting_table_bytes(config, shape, model, left, loaded=not to_load_bytes)
    if config.preemption_mode != "swap":
        return

    def taken(swapped: int) -> int:
        return swapped if stays else _pinned_bytes(plan, swapped)

    if taken(config.swap_space_bytes) > left:
        most = bisect(range(1, left + 1), left, key=taken)  # who asks may ask for any number
        beside = " beside weights and cache" if stays else " to be pinned, in powers of two"
        raise ConfigError(
            "swap_space_bytes",
            f"{format_bytes(config.swap_space_bytes)}, and {format_bytes(left)} of the host's"
            f" memory are available{beside}; set it to at most {most}, or preemption_mode to"
            " recompute",
        )


def _pinned_bytes(plan: CachePlan, swapped: int) -> int:
    """Of the swap space each group has a part of its own, and torch a power of two for it."""
    sizes = [n * one.blob_bytes for n, one in zip(plan.num_blocks, plan.layouts, strict=True)]
    parts = [size * swapped // plan.num_bytes for size in sizes]
    return sum(1 << (part - 1).bit_length() for part in parts)


def table_bytes(
    shape: EngineShape, model: ModelDescription, num_seqs: int, length: int, loaded: bool = False
) -> int:
    """Of running sequences' tokens and blocks, and of rotations, which come with the weights."""
    rows = num_seqs * slot_bytes(length, shape.block_size, len(model.groups))
    return rows + (0 if loaded else length * model.position_bytes)


def _fitting_table_bytes(
    config: EngineConfig, shape: EngineShape, model: ModelDescription, left: int, loaded: bool
) -> int:
    """At most what is left, or a ConfigError."""

    def needed(num_seqs: int, length: int) -> int:
        return table_bytes(shape, model, num_seqs, length, loaded)

    most, longest = config.max_num_seqs, shape.max_model_len
    num_bytes = needed(most, longest)
    if num_bytes <= left:
        return num_bytes
    problem = (
        f"tables for {most} sequences of {longest} tokens take {format_bytes(num_bytes)}, and"
        f" {format_bytes(left)} of the host's memory are available for them"
    )
    fitting = bisect(range(longest), left, key=lambda length: needed(most, length)) - 1
    if needed(1, longest) <= left:
        most = bisect(range(most), left, key=lambda num_seqs: needed(num_seqs, longest)) - 1
        problem += f"; set it to at most {most}"
        advice = f", or max_model_len to at most {fitting}" if fitting > 1 else ""
        raise ConfigError("max_num_seqs", problem + advice)
    advice = f"; set it to at most {fitting}" if fitting > 1 else ""
    raise ConfigError("max_model_len", problem + advice)


def _least(shape: EngineShape, model: ModelDescription) -> int:
    """Bytes of cache for one sequence of `max_model_len`."""
    layouts = [BlockLayout(g, shape.block_size, shape.kv_format) for g in model.groups]
    return bytes_needed(layouts, shape.max_model_len, shape.chunk_tokens)


def _beside(weights: int, steps: int) -> str:
    both = (("weights", weights), ("steps", steps))
    taken = [f"{what} of {format_bytes(num_bytes)}" for what, num_bytes in both if num_bytes]
    return f", beside {' and '.join(taken)}" if taken else ""


def _no_room(shape: EngineShape, model: ModelDescription, available: int, weights: int) -> str:
    if not weights:
        return "nothing is left of the memory beside its weights"
    needed = weights + _least(shape, model)
    problem = (
        f"its weights take {format_bytes(weights)} in {shape.dtype_name}, and"
        f" {format_bytes(available)} of memory are available; with the cache of one sequence of"
        f" {shape.max_model_len} tokens it needs {format_bytes(needed)}"
    )
    return problem + _halved(shape, weights, available)


def _no_way(shape: EngineShape, weights: int, available: int) -> str:
    problem = (
        "transformers loads its weights through the host's memory: they take"
        f" {format_bytes(weights)} in {shape.dtype_name}, and {format_bytes(available)} are"
        " available"
    )
    return problem + _halved(shape, weights, available)


def _halved(shape: EngineShape, weights: int, available: int) -> str:
    fits = shape.dtype == torch.float32 and weights // 2 < available
    return "; as bfloat16 they take half of that" if fits else ""


def _too_small(config: EngineConfig, memory: Memory, left: int, least: int) -> str:
    """`left`: beside weights and steps, of the whole device."""
    total = memory.total_bytes
    problem = (
        f"{gpu_share(config)} of {format_bytes(total)} leaves nothing for the cache:"
        f" weights, steps and what others hold take {format_bytes(total - left)}"
    )
    share = math.ceil((total - left + least) / total * 100) / 100
    if share > 1:
        return f"{problem}, and a sequence of the longest needs {format_bytes(least)}"
    return f"{problem}; set it to at least {share}"
