"""The oracle of the other twins: plain torch, one sequence at a time, everything in fp32."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from engine.kernels.interface import (
    NO_SLOT,
    Activation,
    AttentionSpec,
    Embedding,
    GroupBatch,
    HeadNorm,
    Linear,
    Replay,
    Rotary,
    StepBatch,
)
from kv_cache.slab import KvSlab

KEYS, VALUES = 0, 1  # planes of a slab
SMALLEST_ROW = 2.0**-100  # its largest element; below, 1 / scale could overflow


class ReferenceKernels:
    """Slow and obviously right, for any float dtype, shape and device. Not for serving."""

    name = "reference"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        def apply(x: torch.Tensor) -> torch.Tensor:
            wide_bias = None if bias is None else bias.float()
            return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)

        return apply

    def rows_of(self, linear: Linear) -> Embedding | None:
        return None

    def copies_tied(self, dtype: torch.dtype) -> bool:
        return False

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay | None]:
        return run(), None

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pick_rows(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, numbers)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return normed(x.float(), weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rotary: Rotary,
        norm: HeadNorm | None,
        spec: AttentionSpec,
        slab: KvSlab,
        layer: int,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = split_heads(qkv, spec)
        q, k = q.float(), k.float()
        if norm is not None:
            q, k = normed(q, norm.q_weight, norm.eps), normed(k, norm.k_weight, norm.eps)
        q, k = rotated(q, positions, rotary), rotated(k, positions, rotary)
        self.write_kv(k, v, slab, layer, slots)
        return q.to(qkv.dtype)

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, slab: KvSlab, layer: int, slots: torch.Tensor
    ) -> None:
        written = slots != NO_SLOT
        blocks = slots[written] // slab.layout.block_size
        offsets = slots[written] % slab.layout.block_size
        for plane, rows in ((KEYS, k), (VALUES, v)):
            view = plane_view(slab, layer, plane)
            if slab.layout.format.quantised:
                stored, scales = quantised(rows[written], slab)
                view[blocks, :, offsets] = stored
                scale_view(slab, layer, plane)[blocks, :, offsets] = scales
            else:
                view[blocks, :, offsets] = rows[written].to(slab.data.dtype)

    def attention(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        slab: KvSlab,
        layer: int,
        batch: StepBatch,
        group: GroupBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = q.new_zeros(q.shape[0], spec.num_heads, spec.value_dim)
        starts, kv_lens = batch.query_starts.tolist(), batch.kv_lens.tolist()
        for s, kv_len in enumerate(kv_lens):
            rows = slice(starts[s], starts[s + 1])
            k = cached_rows(slab, layer, KEYS, group.block_tables[s], kv_len)
            v = cached_rows(slab, layer, VALUES, group.block_tables[s], kv_len)
            out[rows] = attend(q[rows].float(), k, v, spec, sinks).to(q.dtype)
        return out

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (activated(gate, activation) * up).to(gate_up.dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def split_heads(
    qkv: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, width]."""
    q_width, k_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q, k, v = torch.tensor_split(qkv, (q_width, q_width + k_width), dim=-1)
    return (
        q.reshape(-1, spec.num_heads, spec.head_dim),
        k.reshape(-1, spec.num_kv_heads, spec.head_dim),
        v.reshape(-1, spec.num_kv_heads, spec.value_dim),
    )


def rotated(x: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """x [tokens, heads, head_dim]."""
    cos, sin = rotary.cos[positions].unsqueeze(1), rotary.sin[positions].unsqueeze(1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def plane_view(slab: KvSlab, layer: int, plane: int) -> torch.Tensor:
    """One layer's keys or values, [num_blocks, kv_heads, block_size, width], no copy."""
    group = slab.layout.group
    width = group.widths[plane]
    return slab.data.as_strided(
        (slab.num_blocks, group.num_kv_heads, slab.layout.block_size, width),
        (slab.block_stride, slab.head_stride, width, 1),
        layer * slab.layer_stride + slab.plane_offsets[plane],
    )


def scale_view(slab: KvSlab, layer: int, plane: int) -> torch.Tensor:
    """The scales of one layer's keys or values, [num_blocks, kv_heads, block_size], no copy."""
    return slab.scales.as_strided(
        (slab.num_blocks, slab.layout.group.num_kv_heads, slab.layout.block_size),
        (slab.scale_block_stride, slab.scale_head_stride, 1),
        slab.scale_offset(layer, plane),
    )


def quantised(rows: torch.Tensor, slab: KvSlab) -> tuple[torch.Tensor, torch.Tensor]:
    """What is stored of rows [..., width], and their scales [...].

    The largest element of a row is stored as the format's largest. A row too small for its scale
    to be a normal number is stored as zeros. One with an infinity or a NaN is stored as zeros with
    an infinite scale, so that all that is read of it is NaN.
    """
    rows, largest = rows.float(), slab.layout.format.largest
    assert largest is not None
    highest = rows.abs().amax(-1)  # NaN where there is one
    scales = torch.where(highest < torch.inf, highest / largest, torch.inf)
    scales = torch.where(highest < SMALLEST_ROW, 1.0, scales)
    stored = (rows * (1.0 / scales).unsqueeze(-1)).nan_to_num(0.0).clamp(-largest, largest)
    if not slab.data.is_floating_point():
        stored = stored.round()
    return stored.to(slab.data.dtype), scales


def cached_rows(
    slab: KvSlab, layer: int, plane: int, table: torch.Tensor, kv_len: int
) -> torch.Tensor:
    """A sequence's keys or values in order, [kv_len, kv_heads, width] fp32."""
    num_blocks = -(-kv_len // slab.layout.block_size)
    held = table[:num_blocks].long()
    rows = plane_view(slab, layer, plane)[held].float()
    if slab.layout.format.quantised:
        rows = rows * scale_view(slab, layer, plane)[held].unsqueeze(-1)
    return rows.transpose(1, 2).flatten(0, 1)[:kv_len]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last q.shape[0] tokens of a sequence over all of it; a query that sees none gives 0."""
    per_kv_head = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(per_kv_head, dim=1), v.repeat_interleave(per_kv_head, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    keys = torch.arange(k.shape[0], device=q.device)
    queries = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device).unsqueeze(1)
    visible = keys <= queries
    if spec.window is not None:
        visible &= keys > queries - spec.window
    # Rows of a freed block (behind the window) may hold anything, NaN too: 0 * NaN is NaN.
    seen = visible.any(0)
    v = v.masked_fill(~seen[:, None, None], 0.0)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sunk = sinks[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sunk), -1)
    weights = scores.softmax(-1)[..., : len(keys)].nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation:
        case Activation.SILU:
            return F.silu(gate)
        case Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh")
        case Activation.GELU:
            return F.gelu(gate)
