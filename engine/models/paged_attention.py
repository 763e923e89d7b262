"""Our paged attention in the place of a transformers model's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.interface import AttentionSpec, Kernels, StepBatch
from kv_cache.slab import KvSlab

PAGED = "kvrelay_paged"


class StepSlot:
    """The step that is being computed, where the attention layers find it."""

    batch: StepBatch | None = None
    slabs: Sequence[KvSlab] = ()
    layers: Sequence[PagedLayer] = ()  # in the order of their calls
    to_come: Iterator[PagedLayer] = iter(())  # in this step


@dataclass(frozen=True, eq=False)
class PagedLayer:
    """Where the keys and values of one call of attention go, and what it computes with them.

    A module that is called several times in a step, such as those of DiffLlama, has several.
    """

    kernels: Kernels
    spec: AttentionSpec
    group: int
    layer: int  # inside the group
    sinks: torch.Tensor | None  # [heads] fp32
    step: StepSlot

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[1, heads, tokens, width] each, to [1, tokens, heads, value_dim]."""
        batch = self.step.batch
        assert batch is not None, "the model's forward was called from outside a step"
        slab, group = self.step.slabs[self.group], batch.groups[self.group]
        q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
        self.kernels.write_kv(k, v, slab, self.layer, group.slots)
        return self.kernels.attention(
            q, self.spec, slab, self.layer, batch, group, self.sinks
        ).unsqueeze(0)


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Everything else that a layer passes was judged when the model was described."""
    layers: list[PagedLayer] = module.kvrelay_layers
    layer = next(layers[0].step.to_come, None)
    assert layer in layers, "attention is called in another order than when it was described"
    return layer(query, key, value), None


def register_paged_attention() -> None:
    """No mask function goes with it, so that transformers builds no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, _paged_attention)
