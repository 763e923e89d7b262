"""The CPU twin of `Kernels`: oneDNN for the matrix products, compiled kernels for the rest."""

import torch
from torch.nn import functional as F

from engine.kernels.cpu.linear import CpuLinear, make_linear
from engine.kernels.interface import (
    Activation,
    AttentionSpec,
    GroupBatch,
    HeadNorm,
    Rotary,
    StepBatch,
)
from kv_cache.slab import KvSlab


class CpuKernels:
    """Every operation of a decoder step on the CPU; holds no state of a step."""

    name = "cpu"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> CpuLinear:
        return make_linear(weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

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
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, dim).split(
            [heads, kv_heads, kv_heads], 1
        )
        q, k = split[0].float(), split[1].float()
        if norm is not None:
            q = self.rms_norm(q, norm.q_weight, norm.eps)
            k = self.rms_norm(k, norm.k_weight, norm.eps)
        cos, sin = rotary.cos[positions][:, None], rotary.sin[positions][:, None]
        self.write_kv(_rotate(k, cos, sin).to(qkv.dtype), split[2], slab, layer, slots)
        return _rotate(q, cos, sin).to(qkv.dtype)

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, slab: KvSlab, layer: int, slots: torch.Tensor
    ) -> None:
        keep = slots >= 0
        size = slab.layout.block_size
        block, token = slots[keep] // size, slots[keep] % size
        for plane, rows in enumerate((k, v)):
            _plane(slab, layer, plane)[block, :, token] = rows[keep].to(slab.data.dtype)

    def attention(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        slab: KvSlab,
        layer: int,
        batch: StepBatch,
        group: GroupBatch,
    ) -> torch.Tensor:
        out = torch.empty(q.shape[0], spec.num_heads, spec.value_dim, dtype=q.dtype)
        starts = batch.query_starts.tolist()
        for s, kv_len in enumerate(batch.kv_lens.tolist()):
            rows = slice(starts[s], starts[s + 1])
            first = 0
            if spec.window is not None:
                first = max(0, kv_len - (rows.stop - rows.start) - spec.window + 1)
            out[rows] = _attend(q[rows], spec, slab, layer, group.block_tables[s], first, kv_len)
        return out

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        match activation:
            case Activation.SILU:
                gate = F.silu(gate)
            case Activation.GELU_TANH:
                gate = F.gelu(gate, approximate="tanh")
            case Activation.GELU:
                gate = F.gelu(gate)
        return (gate * up).to(gate_up.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def _plane(slab: KvSlab, layer: int, plane: int) -> torch.Tensor:
    """[blocks, kv_heads, tokens, width] of one layer, sharing the slab's memory."""
    group, size = slab.layout.group, slab.layout.block_size
    width = group.widths[plane]
    return slab.data.as_strided(
        (slab.num_blocks, group.num_kv_heads, size, width),
        (slab.block_stride, slab.head_stride, width, 1),
        layer * slab.layer_stride + slab.plane_offsets[plane],
    )


def _attend(
    q: torch.Tensor,
    spec: AttentionSpec,
    slab: KvSlab,
    layer: int,
    table: torch.Tensor,
    first: int,
    kv_len: int,
) -> torch.Tensor:
    """One sequence's queries against its tokens first .. kv_len."""
    size = slab.layout.block_size
    blocks = table[first // size : -(-kv_len // size)].long()
    start = first // size * size
    k, v = (
        _plane(slab, layer, plane)[blocks].transpose(0, 1).flatten(1, 2)[:, : kv_len - start]
        for plane in (0, 1)
    )
    repeats = spec.num_heads // spec.num_kv_heads
    k, v = (x.float().repeat_interleave(repeats, 0) for x in (k, v))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    queries = torch.arange(kv_len - q.shape[0], kv_len)[:, None]
    keys = torch.arange(start, kv_len)[None]
    hidden = keys > queries
    if spec.window is not None:
        hidden |= keys <= queries - spec.window
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    return (weights @ v.nan_to_num(0.0)).transpose(0, 1).to(q.dtype)
