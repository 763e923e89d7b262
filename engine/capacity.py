"""What a model needs and what fits, from its description alone, as an engine would decide it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.registry import load_kernels
from engine.memory import (
    CachePlan,
    bytes_needed,
    format_bytes,
    largest_model_len,
    plan_cache,
)
from engine.models.interface import ModelDescription
from engine.sizing import (
    FORMAT_NAMES,
    EngineShape,
    Memory,
    cpu_cache_bytes,
    decide_shape,
    find_device,
    gpu_cache_bytes,
    gpu_share,
    gpu_step_bytes,
    memory_of,
    table_bytes,
)
from kv_cache.layout import KV_FORMATS, BlockLayout


@dataclass(frozen=True)
class FormatCapacity:
    """What one KV format makes of a memory; the counts are None where not even one fits."""

    kv_format: str
    served: bool  # by the engine, with the weights in this type
    bytes_per_token: int  # of a sequence short enough that every layer keeps all of it
    block_bytes: int  # of all groups
    num_blocks: tuple[int, ...] | None  # of each group
    num_tokens: int | None  # that layers which see all keep, of any sequences
    num_sequences: int | None  # of `context_tokens` each, at once
    problem: str | None = None


@dataclass(frozen=True)
class Capacity:
    """The answer of `kvrelay plan`."""

    architecture: str
    native: bool
    num_parameters: int
    device: str
    dtype: str
    weight_bytes: int
    memory_bytes: int  # of a CPU what is available, of a GPU all that it has
    held_bytes: int  # of that, by others
    gpu_memory_utilization: float | None  # of memory_bytes; None on a CPU
    step_bytes: int  # that a GPU keeps free
    table_bytes: int  # of a CPU's memory
    cache_bytes: int  # what all that leaves
    default_cache_bytes: int  # what the engine takes of it where it is not told
    context_tokens: int
    block_size: int
    formats: tuple[FormatCapacity, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_capacity(
    config: EngineConfig, model: ModelDescription, memory_bytes: int | None
) -> Capacity:
    """Of `max_model_len` tokens a sequence. The device that the configuration names need not be
    here, if its memory is told; that of None is what is available here."""
    device = find_device(config) if config.device == "auto" else torch.device(config.device)
    shape = decide_shape(config, model, device)
    memory = _memory(device, memory_bytes)
    weights = weight_bytes(config, shape, model)
    on_gpu = device.type == "cuda"
    tables = 0 if on_gpu else table_bytes(shape, model, config.max_num_seqs, shape.max_model_len)
    beside_weights = max(memory.available_bytes - weights, 0)
    left = max(beside_weights - tables, 0)
    if on_gpu:
        left = max(gpu_cache_bytes(config, shape, model, memory, weights), 0)
    return Capacity(
        architecture=model.architecture,
        native=model.native,
        num_parameters=model.num_parameters,
        device=device.type,
        dtype=shape.dtype_name,
        weight_bytes=weights,
        memory_bytes=memory.total_bytes,
        held_bytes=memory.total_bytes - memory.available_bytes,
        gpu_memory_utilization=gpu_share(config) if on_gpu else None,
        step_bytes=gpu_step_bytes(config, shape, model) if on_gpu else 0,
        table_bytes=tables,
        cache_bytes=left,
        default_cache_bytes=(
            left if on_gpu else min(cpu_cache_bytes(shape, model, beside_weights), left)
        ),
        context_tokens=shape.max_model_len,
        block_size=shape.block_size,
        formats=tuple(
            _format_capacity(
                replace(shape, kv_format=kv_format),
                model,
                left,
                _is_served(config, model, device, kv_format.name),
            )
            for kv_format in KV_FORMATS.values()
        ),
    )


def weight_bytes(config: EngineConfig, shape: EngineShape, model: ModelDescription) -> int:
    """As an engine has them. Kernels for a GPU, which never copy, cannot be made without one."""
    copies_tied = (
        model.num_tied > 0
        and shape.device.type == "cpu"
        and load_kernels(config.kernels, shape.device).copies_tied(shape.dtype)
    )
    return model.weight_bytes(shape.dtype.itemsize, copies_tied)


def _memory(device: torch.device, given_bytes: int | None) -> Memory:
    if given_bytes is not None:
        return Memory(given_bytes, given_bytes)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("memory", "must be given: torch sees no 'cuda' here to ask for it")
    return memory_of(device)


def _is_served(
    config: EngineConfig, model: ModelDescription, device: torch.device, kv_format: str
) -> bool:
    names = [name for name, format in FORMAT_NAMES.items() if format == kv_format]
    if not names:
        return False  # one whose blocks the layout knows and whose kernels are still to come
    try:
        decide_shape(replace(config, kv_cache_dtype=names[0]), model, device)
    except ConfigError as error:
        if error.field != "kv_cache_dtype":
            raise
        return False
    return True


def _format_capacity(
    shape: EngineShape, model: ModelDescription, cache_bytes: int, served: bool
) -> FormatCapacity:
    layouts = [BlockLayout(group, shape.block_size, shape.kv_format) for group in model.groups]
    block_bytes = sum(layout.blob_bytes for layout in layouts)
    problem = _problem(layouts, cache_bytes, shape.max_model_len, shape.chunk_tokens)
    plan: CachePlan | None = None
    if problem is None:
        plan = plan_cache(
            model.groups,
            shape.kv_format,
            shape.block_size,
            cache_bytes,
            shape.max_model_len,
            shape.chunk_tokens,
        )
    return FormatCapacity(
        kv_format=shape.kv_format.name,
        served=served,
        bytes_per_token=block_bytes // shape.block_size,
        block_bytes=block_bytes,
        num_blocks=None if plan is None else plan.num_blocks,
        num_tokens=None if plan is None else plan.num_tokens,
        num_sequences=None if plan is None else plan.num_sequences(shape.max_model_len),
        problem=problem,
    )


def _problem(
    layouts: Sequence[BlockLayout], cache_bytes: int, context_tokens: int, chunk_tokens: int
) -> str | None:
    need = bytes_needed(layouts, context_tokens, chunk_tokens)
    if need <= cache_bytes:
        return None
    problem = f"a sequence of {context_tokens} tokens needs {format_bytes(need)} of cache"
    fitting = largest_model_len(layouts, cache_bytes, context_tokens, chunk_tokens)
    return f"{problem}; the longest that fits has {fitting} tokens" if fitting else problem
