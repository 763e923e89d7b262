"""What a model needs and what fits, from its description alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.memory import (
    CachePlan,
    bytes_needed,
    format_bytes,
    largest_model_len,
    plan_cache,
)
from engine.models.interface import ModelDescription
from kv_cache.layout import KV_FORMATS, BlockLayout, KvFormat

# int4 is one whose blocks the layout knows and whose kernels are still to come
SERVED_FORMATS = ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8")


@dataclass(frozen=True)
class FormatCapacity:
    """What one KV format makes of a memory; the counts are None where not even one fits."""

    kv_format: str
    served: bool
    bytes_per_token: int  # of a sequence short enough that every layer keeps all of it
    block_bytes: int  # of all groups
    num_blocks: tuple[int, ...] | None  # of each group
    num_sequences: int | None  # of `context_tokens` each, at once
    problem: str | None = None


@dataclass(frozen=True)
class Capacity:
    """The answer of `kvrelay plan`."""

    architecture: str
    native: bool
    num_parameters: int
    weight_bytes: int
    memory_bytes: int
    cache_bytes: int  # what the weights leave
    context_tokens: int
    block_size: int
    formats: tuple[FormatCapacity, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_capacity(
    model: ModelDescription,
    weight_bytes: int,
    memory_bytes: int,
    context_tokens: int,
    block_size: int,
    chunk_tokens: int,
) -> Capacity:
    cache_bytes = max(memory_bytes - weight_bytes, 0)
    chunk = min(chunk_tokens, context_tokens)
    formats = tuple(
        _format_capacity(model, kv_format, cache_bytes, context_tokens, block_size, chunk)
        for kv_format in KV_FORMATS.values()
    )
    return Capacity(
        architecture=model.architecture,
        native=model.native,
        num_parameters=model.num_parameters,
        weight_bytes=weight_bytes,
        memory_bytes=memory_bytes,
        cache_bytes=cache_bytes,
        context_tokens=context_tokens,
        block_size=block_size,
        formats=formats,
    )


def _format_capacity(
    model: ModelDescription,
    kv_format: KvFormat,
    cache_bytes: int,
    context_tokens: int,
    block_size: int,
    chunk_tokens: int,
) -> FormatCapacity:
    layouts = [BlockLayout(group, block_size, kv_format) for group in model.groups]
    block_bytes = sum(layout.blob_bytes for layout in layouts)
    problem = _problem(layouts, cache_bytes, context_tokens, chunk_tokens)
    plan: CachePlan | None = None
    if problem is None:
        plan = plan_cache(
            model.groups, kv_format, block_size, cache_bytes, context_tokens, chunk_tokens
        )
    return FormatCapacity(
        kv_format=kv_format.name,
        served=kv_format.name in SERVED_FORMATS,
        bytes_per_token=block_bytes // block_size,
        block_bytes=block_bytes,
        num_blocks=None if plan is None else plan.num_blocks,
        num_sequences=None if plan is None else plan.num_sequences(context_tokens),
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
