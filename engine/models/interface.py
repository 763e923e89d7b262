"""What a model offers the runner, and what is known of it before any weight is read.

Importable without torch: the HTTP front reads descriptions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from engine.errors import ConfigError
from kv_cache.layout import KvGroup

if TYPE_CHECKING:
    import torch

    from engine.kernels.interface import StepBatch
    from kv_cache.slab import KvSlab

LoadFormat = Literal["auto", "dummy"]  # dummy: random weights, a function of config and seed
DtypeName = Literal["float32", "bfloat16", "float16"]


class CausalModel(Protocol):
    """Weights on one device and the arithmetic of a step; keeps nothing that a later step needs."""

    @property
    def vocab_size(self) -> int: ...

    def prepare(self, slabs: Sequence[KvSlab], max_num_seqs: int) -> None:
        """Makes ready, before the first request, what a step of at most so many sequences over
        these slabs would have to wait for."""
        ...

    def forward(
        self, batch: StepBatch, slabs: Sequence[KvSlab], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states after the final norm, [num_tokens, hidden]; the next call may overwrite
        them.

        With `wanted` (int64 indices of tokens) only those rows, in that order: the rest of the
        last layer is then not computed for the others. Writes the step's keys and values into
        `slabs`; slabs[g] and batch.groups[g] belong to `ModelDescription.groups[g]`. Call under
        `torch.inference_mode()`, from one thread.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab_size] in the model's dtype, final soft cap included; the
        next `forward` may overwrite them. Of what `forward` gave it may have computed them."""
        ...


@dataclass(frozen=True)
class ModelDescription:
    """A model's shape, from its config alone: what memory planning and naming need."""

    architecture: str
    native: bool  # our decoder; otherwise transformers' own, with paged attention plugged in
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int  # of queries
    mlp_size: int  # elements between an MLP's products, of all experts that a token goes to
    max_model_len: int  # positions that the config promises to handle
    dtype: DtypeName  # the checkpoint's
    num_parameters: int  # tied weights once
    groups: tuple[KvGroup, ...]  # the full-attention group first
    num_tied: int = 0  # of the parameters: both embedding and head, of which kernels may need two
    # Where max_model_len is above this, longrope's other factors serve: other keys are cached.
    longrope_limit: int | None = None
    position_bytes: int = 0  # of its tables of rotations, for each of max_model_len positions

    def length_for(self, wanted: int | None) -> int:
        """Of prompt and answer together, where so much is asked for. ConfigError for more than the
        model handles."""
        if wanted is not None and wanted > self.max_model_len:
            problem = f"{wanted}, the model handles at most {self.max_model_len}"
            if not self.native and self.max_model_len == self.longrope_limit:
                problem += (
                    " (original_max_position_embeddings): longrope's factors for more are"
                    f" not supported for {self.architecture}"
                )
            raise ConfigError("max_model_len", problem)
        return wanted or self.max_model_len

    def weight_bytes(self, itemsize: int, copies_tied: bool) -> int:
        """By the config's shapes, which the checkpoint's are held against."""
        return (self.num_parameters + self.num_tied * copies_tied) * itemsize

    @property
    def pair_share(self) -> float:
        """The multiplications of a token that attends to another one, of those that it takes by
        itself, the head's left out."""
        by_itself = attending = 0
        for group in self.groups:
            width, layers = sum(group.widths), len(group.layers)
            heads = self.num_heads + group.num_kv_heads
            by_itself += layers * self.hidden_size * (heads * width + 3 * self.mlp_size)
            attending += layers * self.num_heads * width
        return attending / by_itself

    def variant(self, dtype: str) -> str:
        """What else decides the cache's contents, as a part of its fingerprint: max_model_len, and
        the type that is computed in, where it is not the checkpoint's. A cache in that type says
        so by its format, but a quantised one holds other bytes under the same."""
        limit = self.longrope_limit
        longrope = limit is not None and self.max_model_len > limit
        parts = ["longrope"] * longrope + [dtype] * (dtype != self.dtype)
        return "+".join(parts)
