"""The shape of the native decoder: every way in which the covered families differ, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from engine.models.interface import DtypeName
from engine.models.rope_config import LongRopeScaling, RopeConfig, longest_context
from kv_cache.layout import KvGroup


@dataclass(frozen=True)
class LayerConfig:
    window: int | None  # tokens a query sees, itself included; None sees everything
    rope: RopeConfig


@dataclass(frozen=True)
class CheckpointStyle:
    """How the family's checkpoints name and cut their tensors."""

    prefixes: tuple[str, ...] = ("model.",)  # the first one that the checkpoint uses
    fused: bool = False  # qkv_proj and gate_up_proj as one tensor each (Phi-3)
    ignored_prefixes: tuple[str, ...] = ()  # of tensors that belong to other modalities


@dataclass(frozen=True)
class DecoderConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    activation: str  # a value of kernels.interface.Activation
    norm_eps: float
    max_positions: int
    dtype: DtypeName
    attention_scale: float
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # RMSNorm over each head of queries and keys
    sandwich_norms: bool = False  # a norm behind attention and MLP too (Gemma)
    norm_adds_one: bool = False  # the stored norm weight is w - 1 (Gemma)
    tied_embeddings: bool = False
    tied_without_head: bool = False  # tied also where no head is stored
    initializer_range: float = 0.02
    style: CheckpointStyle = CheckpointStyle()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def max_context(self) -> int:
        return min(longest_context(self.max_positions, layer.rope) for layer in self.layers)

    @property
    def longrope_limit(self) -> int | None:
        scalings = (layer.rope.scaling for layer in self.layers)
        limits = [s.original_max_positions for s in scalings if isinstance(s, LongRopeScaling)]
        return limits[0] if limits else None

    @cached_property
    def groups(self) -> tuple[KvGroup, ...]:
        return group_layers(
            (self.num_kv_heads, (self.head_dim, self.head_dim), layer.window)
            for layer in self.layers
        )


LayerShape = tuple[int, tuple[int, ...], int | None]  # kv heads, plane widths, window


def group_layers(shapes: Iterable[LayerShape]) -> tuple[KvGroup, ...]:
    """Layers of one reach and shape make one group; full attention first, then by first layer."""
    members: dict[LayerShape, list[int]] = {}
    for index, shape in enumerate(shapes):
        members.setdefault(shape, []).append(index)
    groups = [KvGroup(tuple(layers), *shape) for shape, layers in members.items()]
    return tuple(sorted(groups, key=lambda g: (g.window is not None, g.layers[0])))
