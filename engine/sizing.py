"""What the configuration leaves open, decided from the model and the machine."""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.machine import available_memory, num_cpus
from engine.memory import CachePlan, bytes_needed, format_bytes, plan_cache
from engine.models.interface import ModelDescription
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
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8": "int8",
}

DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
# A CPU's cache is modest unless asked for: its pages are slow to come the first time, and the
# machine has other work. One longest sequence fits in any case.
CPU_CACHE_BYTES = 512 << 20
CPU_CACHE_SHARE = 0.25
# what a step needs on a GPU beside weights and cache: activations, logits, workspaces
GPU_STEP_BYTES = 2 << 30


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


def decide_shape(config: EngineConfig, model: ModelDescription) -> EngineShape:
    device = _device(config)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    if kv_dtype in DTYPES and kv_dtype != dtype:
        quantised = ", ".join(name for name in FORMAT_NAMES if name not in DTYPES)
        raise ConfigError(
            "kv_cache_dtype", f"{kv_dtype!r}, must be the model's {dtype!r} or one of {quantised}"
        )
    max_model_len = config.max_model_len or model.max_model_len
    if max_model_len > model.max_model_len:
        raise ConfigError(
            "max_model_len",
            f"{max_model_len}, the model handles at most {model.max_model_len}",
        )
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


def _device(config: EngineConfig) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "'cuda', and torch sees no such device here")
    return torch.device(name)


def size_cache(config: EngineConfig, shape: EngineShape, model: ModelDescription) -> CachePlan:
    """Called with the weights loaded, so what is left is what the cache can have."""
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = _gpu_budget(config) if shape.device.type == "cuda" else _cpu_budget(shape, model)
    elif shape.device.type == "cpu" and budget > available_memory():
        raise ConfigError(
            "kv_cache_memory_bytes",
            f"{format_bytes(budget)}, and {format_bytes(available_memory())} are available",
        )
    return plan_cache(
        model.groups,
        shape.kv_format,
        shape.block_size,
        budget,
        shape.max_model_len,
        shape.chunk_tokens,
    )


def _cpu_budget(shape: EngineShape, model: ModelDescription) -> int:
    layouts = [BlockLayout(g, shape.block_size, shape.kv_format) for g in model.groups]
    longest = bytes_needed(layouts, shape.max_model_len, shape.chunk_tokens)
    return min(max(longest, CPU_CACHE_BYTES), int(available_memory() * CPU_CACHE_SHARE))


def _gpu_budget(config: EngineConfig) -> int:
    free, total = torch.cuda.mem_get_info()
    used = total - free
    return int(total * config.gpu_memory_utilization) - used - GPU_STEP_BYTES
