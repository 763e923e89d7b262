"""Builds the native decoder, one tensor after the other, so that no plain copy outlives its use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.kernels.interface import (
    Activation,
    AttentionSpec,
    Embedding,
    HeadNorm,
    Kernels,
    Linear,
    Rotary,
)
from engine.models.decoder import Attention, Decoder, FeedForward, Layer, Norm
from engine.models.decoder_config import DecoderConfig
from engine.models.decoder_tensors import DecoderTensors, LayerTensors, Part, Stack
from engine.models.rope import rotary_tables
from engine.models.rope_config import RopeConfig
from engine.weights import TensorSource


@dataclass(frozen=True, eq=False)
class Reader:
    """Tensors of the model in the type and on the device where they will be used: filled there."""

    source: TensorSource
    dtype: torch.dtype
    device: torch.device

    def stacked(self, stack: Stack) -> torch.Tensor:
        rows = sum(part.shape[0] for part in stack)
        shape = (rows, *stack[0].shape[1:])
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        start = 0
        for part in stack:
            self.source.read(part.name, whole[start : start + part.shape[0]])
            start += part.shape[0]
        return whole

    def norm_weight(self, part: Part, adds_one: bool) -> torch.Tensor:
        weight = torch.empty(part.shape, dtype=torch.float32, device=self.device)
        self.source.read(part.name, weight)
        return weight + 1.0 if adds_one else weight


@dataclass(frozen=True, eq=False)
class PlainEmbedding:
    kernels: Kernels
    weight: torch.Tensor  # [vocab, hidden]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.kernels.pick_rows(self.weight, token_ids)


class DecoderLoader:
    """Puts a `Decoder` together from a config and its tensors."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: DecoderTensors,
        reader: Reader,
        kernels: Kernels,
        max_positions: int,
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._reader = reader
        self._kernels = kernels
        self._max_positions = max_positions
        self._rotaries: dict[RopeConfig, Rotary] = {}
        self._activation = Activation(config.activation)

    def load(self) -> Decoder:
        config, tensors = self._config, self._tensors
        embedding, head = self._ends()
        norms = [self._norm(layer.input_norm) for layer in tensors.layers]
        norms.append(self._norm(tensors.final_norm))
        return Decoder(
            self._kernels,
            config.vocab_size,
            embedding,
            self._embedding_scale(),
            norms[0],
            list(self._layers(norms[1:])),
            head,
            config.final_soft_cap,
        )

    def _ends(self) -> tuple[Embedding, Linear]:
        """The embedding and the head; of one weight in one copy, where the head's can be read."""
        tensors = self._tensors
        embedding = self._reader.stacked((tensors.embedding,))
        if tensors.head is not None:
            return PlainEmbedding(self._kernels, embedding), self._linear((tensors.head,), ())
        head = self._kernels.linear(embedding, None)
        return self._kernels.rows_of(head) or PlainEmbedding(self._kernels, embedding), head

    def _embedding_scale(self) -> torch.Tensor | None:
        scale, reader = self._config.embedding_scale, self._reader
        return (
            None if scale is None else torch.tensor(scale, dtype=reader.dtype, device=reader.device)
        )

    def _layers(self, next_norms: list[Norm]) -> Iterator[Layer]:
        for index, tensors in enumerate(self._tensors.layers):
            group, place = self._place(index)
            yield Layer(
                self._kernels,
                group,
                self._attention(index, place, tensors),
                self._optional_norm(tensors.post_attention_norm),
                self._norm(tensors.mlp_norm),
                FeedForward(
                    self._kernels,
                    self._linear(tensors.gate_up, tensors.gate_up_bias),
                    self._linear(tensors.down, tensors.down_bias),
                    self._activation,
                ),
                self._optional_norm(tensors.post_mlp_norm),
                next_norms[index],
            )

    def _place(self, index: int) -> tuple[int, int]:
        """A layer's group, and its place inside it."""
        for number, group in enumerate(self._config.groups):
            if index in group.layers:
                return number, group.layers.index(index)
        raise AssertionError(f"layer {index} is in no group")

    def _attention(self, index: int, place: int, tensors: LayerTensors) -> Attention:
        config, layer = self._config, self._config.layers[index]
        spec = AttentionSpec(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.head_dim,
            config.attention_scale,
            layer.window,
            config.attention_soft_cap,
        )
        return Attention(
            self._kernels,
            self._linear(tensors.qkv, tensors.qkv_bias),
            self._linear(tensors.output, tensors.output_bias),
            spec,
            self._rotary(layer.rope),
            self._head_norm(tensors),
            place,
        )

    def _linear(self, weight: Stack, bias: Stack) -> Linear:
        stacked_bias = self._reader.stacked(bias) if bias else None
        return self._kernels.linear(self._reader.stacked(weight), stacked_bias)

    def _norm(self, part: Part) -> Norm:
        config = self._config
        return Norm(self._reader.norm_weight(part, config.norm_adds_one), config.norm_eps)

    def _optional_norm(self, part: Part | None) -> Norm | None:
        return None if part is None else self._norm(part)

    def _head_norm(self, tensors: LayerTensors) -> HeadNorm | None:
        if tensors.query_norm is None or tensors.key_norm is None:
            return None
        query, key = self._norm(tensors.query_norm), self._norm(tensors.key_norm)
        return HeadNorm(query.weight, key.weight, self._config.norm_eps)

    def _rotary(self, rope: RopeConfig) -> Rotary:
        if rope not in self._rotaries:
            device = self._reader.device
            self._rotaries[rope] = rotary_tables(rope, self._max_positions, device)
        return self._rotaries[rope]
