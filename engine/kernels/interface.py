"""What a set of kernels offers: one signature, three twins.

`reference` (torch, slow, the oracle), `cpu` (Numba and oneDNN) and `triton` (GPU) all provide
`Kernels`. Models call nothing else for the work of a step, so a twin is chosen once, at load.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from kv_cache.slab import KvSlab

NO_SLOT = -1  # a token whose keys and values are cached already: nothing is written for it


class Activation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"


@dataclass(frozen=True, eq=False)
class GroupBatch:
    """Where the tokens of a step lie in one group's slab.

    Entries of a block table are 0 behind a window, and anything beyond the sequence's length.
    """

    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32
    slots: torch.Tensor  # [num_tokens] int64, block * block_size + offset, or NO_SLOT


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The tokens of one step, flattened; sequences of one token come first.

    Sequence s owns tokens query_starts[s] .. query_starts[s + 1], which are the last ones of
    its kv_lens[s] cached tokens once this step's keys and values are written. All tensors are
    on the kernels' device; the plain numbers are their host-side summary.
    """

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    query_starts: torch.Tensor  # [num_seqs + 1] int32
    kv_lens: torch.Tensor  # [num_seqs] int32
    groups: tuple[GroupBatch, ...]
    num_decode: int  # leading sequences with exactly one token
    max_query_len: int
    max_kv_len: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.kv_lens.shape[0]


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention computes; a query at i sees j with i - window < j <= i."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None  # cap * tanh(score / cap)


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotation of the first `2 * cos.shape[1]` elements of each head; the rest passes through.

    Half-split pairing as in Llama: element i turns with element i + cos.shape[1].
    """

    cos: torch.Tensor  # [max_positions, rotary_dim / 2] fp32, attention scaling included
    sin: torch.Tensor


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm over each head of the queries and keys before rotation (Qwen 3, Gemma 3)."""

    q_weight: torch.Tensor  # [head_dim] fp32
    k_weight: torch.Tensor  # [head_dim] fp32
    eps: float


class Linear(Protocol):
    """A weight in the form its kernel likes best; made once by `Kernels.linear`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] -> [tokens, out], in x's dtype."""
        ...


class Embedding(Protocol):
    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, in]: rows of a weight, to the last bit."""
        ...


class Replay(Protocol):
    def __call__(self) -> None: ...


class Kernels(Protocol):
    """The operations of a decoder step. Inputs are contiguous unless said otherwise.

    Norm weights are fp32 (Gemma's +1 folded in); every reduction is in fp32; results are in
    the dtype of the activations.
    """

    name: str

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Takes [out, in]; the caller drops its own reference to the weight afterwards."""
        ...

    def rows_of(self, linear: Linear) -> Embedding | None:
        """What reads them where a `linear` of these kernels has its weight, so that nobody else
        need keep it; None where rows cannot be told apart there, or nothing was copied."""
        ...

    def copies_tied(self, dtype: torch.dtype) -> bool:
        """Whether an embedding that is the head too is in memory twice."""
        ...

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay | None]:
        """Runs it, and gives its result with what repeats all of its calls: on the memory that
        they had, which must stay, with what is there then. The result is overwritten by that,
        and by the next recording. None where calls are not repeated, or not they alone
        computed."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """What is called in the block may be computed at its end. Tensors that were there before
        it must stay until then; those that kernels return in it are overwritten in the next one."""
        ...

    def pick_rows(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """[rows, width] and [picked] int64, each one of a row that there is -> [picked, width]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x in place, then the norm of the sum."""
        ...

    def rotate_and_write(
        self,
        qkv: torch.Tensor,  # [tokens, (heads + 2 * kv_heads) * head_dim]
        positions: torch.Tensor,
        rotary: Rotary,
        norm: HeadNorm | None,
        spec: AttentionSpec,
        slab: KvSlab,
        layer: int,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Norms and turns queries and keys, writes keys and values to their slots.

        Returns the queries, [tokens, heads, head_dim]. `layer` counts inside the group.
        """
        ...

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, slab: KvSlab, layer: int, slots: torch.Tensor
    ) -> None:
        """k [tokens, kv_heads, head_dim] and v [tokens, kv_heads, value_dim] to their slots."""
        ...

    def attention(
        self,
        q: torch.Tensor,  # [tokens, heads, head_dim]
        spec: AttentionSpec,
        slab: KvSlab,
        layer: int,
        batch: StepBatch,
        group: GroupBatch,
        sinks: torch.Tensor | None = None,  # [heads] fp32
    ) -> torch.Tensor:
        """Causal attention over the cached tokens, [tokens, heads, value_dim]. A head's sink is
        one score more for each of its queries, of a token whose value is nothing."""
        ...

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """act(gate) * up for gate_up [tokens, 2 * width] laid out as gate then up."""
        ...
