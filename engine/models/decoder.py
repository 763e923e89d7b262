"""The native decoder: one arithmetic for every covered family, configured by `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.interface import (
    Activation,
    AttentionSpec,
    Embedding,
    GroupBatch,
    HeadNorm,
    Kernels,
    Linear,
    Rotary,
    StepBatch,
)
from kv_cache.slab import KvSlab

Place = tuple[KvSlab, GroupBatch]  # of a layer's group, in this step


@dataclass(frozen=True, eq=False, slots=True)
class Norm:
    """RMSNorm's weight, [hidden] fp32 with Gemma's + 1 folded in."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False, slots=True)
class Attention:
    """One layer's attention, from the normed input to what `output` adds to the residual."""

    kernels: Kernels
    qkv: Linear
    output: Linear
    spec: AttentionSpec
    rotary: Rotary
    head_norm: HeadNorm | None
    layer: int  # inside the group

    def __call__(self, x: torch.Tensor, batch: StepBatch, place: Place) -> torch.Tensor:
        slab, group = place
        queries = self.kernels.rotate_and_write(
            self.qkv(x),
            batch.positions,
            self.rotary,
            self.head_norm,
            self.spec,
            slab,
            self.layer,
            group.slots,
        )
        mixed = self.kernels.attention(queries, self.spec, slab, self.layer, batch, group)
        return mixed.view(mixed.shape[0], -1)


@dataclass(frozen=True, eq=False, slots=True)
class FeedForward:
    kernels: Kernels
    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.kernels.gated_activation(self.gate_up(x), self.activation))


@dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """A block between two residual sums; takes its input normed and leaves the next one's so."""

    kernels: Kernels
    group: int
    attention: Attention
    post_attention_norm: Norm | None
    mlp_norm: Norm
    mlp: FeedForward
    post_mlp_norm: Norm | None
    next_norm: Norm  # the next layer's input norm, or the model's final one

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        batch: StepBatch,
        place: Place,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.attention(x, batch, place)
        if wanted is not None:
            x = self.kernels.pick_rows(x, wanted)
            residual = self.kernels.pick_rows(residual, wanted)
        x = self.attention.output(x)
        x = self._normed_sum(x, self.post_attention_norm, residual, self.mlp_norm)
        x = self.mlp(x)
        return self._normed_sum(x, self.post_mlp_norm, residual, self.next_norm)

    def _normed_sum(
        self, x: torch.Tensor, own: Norm | None, residual: torch.Tensor, following: Norm
    ) -> torch.Tensor:
        if own is not None:
            x = self.kernels.rms_norm(x, own.weight, own.eps)
        return self.kernels.add_rms_norm(x, residual, following.weight, following.eps)


class Decoder:
    """A `CausalModel` of RMS-normed blocks with rotary, paged attention and a gated MLP."""

    def __init__(
        self,
        kernels: Kernels,
        vocab_size: int,
        embedding: Embedding,
        embedding_scale: torch.Tensor | None,  # in the weights' type, as it was trained with
        first_norm: Norm,
        layers: Sequence[Layer],
        head: Linear,
        soft_cap: float | None,
    ) -> None:
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._embedding = embedding
        self._embedding_scale = embedding_scale
        self._first_norm = first_norm
        self._layers = tuple(layers[:-1])
        self._last_layer = layers[-1]
        self._head = head
        self._soft_cap = soft_cap

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def prepare(self, slabs: Sequence[KvSlab], max_num_seqs: int) -> None:
        """Is ready."""

    def forward(
        self, batch: StepBatch, slabs: Sequence[KvSlab], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.transform(self.embed(batch.token_ids), batch, slabs, wanted)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self._embedding(token_ids)
        if self._embedding_scale is not None:
            hidden *= self._embedding_scale
        return hidden

    def transform(
        self,
        residual: torch.Tensor,  # the tokens' embeddings, which are overwritten
        batch: StepBatch,
        slabs: Sequence[KvSlab],
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        places = list(zip(slabs, batch.groups, strict=True))
        last = self._last_layer
        with self._kernels.together():
            x = self._kernels.rms_norm(residual, self._first_norm.weight, self._first_norm.eps)
            for layer in self._layers:
                x = layer(x, residual, batch, places[layer.group])
            return last(x, residual, batch, places[last.group], wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.capped(self.scores(hidden))

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits before the soft cap, if the model has one."""
        return self._head(hidden)

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Overwrites them."""
        if self._soft_cap is not None:
            scores.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return scores
