"""Launches over tensors without memory, for models that the kernels have to serve."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from engine.kernels.interface import (
    Activation,
    AttentionSpec,
    GroupBatch,
    HeadNorm,
    Rotary,
    StepBatch,
)
from engine.kernels.triton.activation import gated_launch
from engine.kernels.triton.decode import decode_launches
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.norm import norm_launch
from engine.kernels.triton.prefill import prefill_launch
from engine.kernels.triton.rotate import rotate_launch
from engine.kernels.triton.write import write_launch
from engine.sampler.table import SLOT
from engine.sampler.triton import draw_launch
from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup
from kv_cache.slab import KvSlab

META = torch.device("meta")
TOKENS = 2048  # of the prefill
FEW = 16  # of one whose rows are 64 at most: the wider a head, the nearer that is to the limits
SEQS = 256  # of the decode step
MAX_LEN = 8192
NUM_BLOCKS = 12_000
H200_PROGRAMS = 264
VOCAB = 128256


class ModelShape(NamedTuple):
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int = 4096
    mlp: int = 14336
    block_size: int = 64
    format: str = "bf16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    head_norm: bool = False
    rotary_dim: int | None = None  # None: all of a head turns
    attention_only: bool = True

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.head_dim,
            self.head_dim**-0.5,
            self.window,
            self.soft_cap,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of a cache that is not quantised."""
        return {"fp32": torch.float32, "fp16": torch.float16}.get(self.format, torch.bfloat16)

    def slab(self) -> KvSlab:
        widths = (self.head_dim, self.head_dim)
        group = KvGroup(tuple(range(32)), self.kv_heads, widths, self.window)
        layout = BlockLayout(group, self.block_size, KV_FORMATS[self.format])
        return KvSlab.allocate(layout, NUM_BLOCKS, META)


SHAPES = (
    ModelShape("llama-3.1-8b", 32, 8, 128, attention_only=False),
    ModelShape("llama, block 16", 32, 8, 128, block_size=16),
    ModelShape("llama, fp32", 32, 8, 128, format="fp32"),
    ModelShape("llama-3.2-1b", 32, 8, 64),
    ModelShape("fp16, partial", 32, 8, 128, format="fp16", rotary_dim=96, attention_only=False),
    ModelShape("qwen3-8b", 32, 8, 128, head_norm=True),
    ModelShape("phi-3-mini", 32, 32, 96),
    ModelShape("phi-4-mini", 24, 8, 128),
    ModelShape("qwen2.5-7b", 28, 4, 128),
    ModelShape("gemma-3-27b local", 32, 16, 128, window=1024),
    ModelShape("gemma-2-27b global", 32, 16, 128, soft_cap=50.0),
    ModelShape("gemma-2-9b local", 16, 8, 256, window=4096, soft_cap=50.0),
    ModelShape("gemma-2-9b global", 16, 8, 256, soft_cap=50.0),
    ModelShape("gpt-oss local", 64, 8, 64, window=128, sinks=True),
    ModelShape("llama, fp8_e4m3", 32, 8, 128, format="fp8_e4m3"),
    ModelShape("llama, fp8_e5m2", 32, 8, 128, format="fp8_e5m2"),
    ModelShape("int8, block 16", 32, 8, 128, block_size=16, format="int8", rotary_dim=64),
    ModelShape("gemma-2, fp8_e4m3", 16, 8, 256, format="fp8_e4m3", window=4096, soft_cap=50.0),
    ModelShape("gemma, fp8 global", 16, 8, 256, format="fp8_e4m3", soft_cap=50.0),
)


def launches_of(shape: ModelShape) -> Iterator[Launch]:
    slab, dtype = shape.slab(), shape.dtype
    spec = shape.spec
    if not shape.attention_only:
        yield from _row_launches(shape, dtype)
    if shape.head_norm or not shape.attention_only or slab.layout.format.quantised:
        yield from _write_launches(shape, slab)
    if shape.head_norm:
        return
    group = GroupBatch(_ints(SEQS, MAX_LEN // shape.block_size), _longs(SEQS))
    q = torch.empty(TOKENS, spec.num_heads, spec.head_dim, dtype=dtype, device=META)
    out = torch.empty_like(q)
    sinks = torch.empty(spec.num_heads, device=META) if shape.sinks else None
    decode = _batch(group, num_seqs=SEQS, num_decode=SEQS, max_query_len=1)
    yield from decode_launches(q, spec, slab, 3, decode, group, sinks, out, H200_PROGRAMS)
    for num_queries in (TOKENS, FEW) if spec.head_dim > 128 else (TOKENS,):
        prefill = _batch(group, num_seqs=1, num_decode=0, max_query_len=num_queries)
        yield prefill_launch(q, spec, slab, 3, prefill, group, sinks, out)


def draws() -> Iterator[tuple[str, Launch]]:
    """Of rows as a model makes them, and of those that a request has edited."""
    records = _longs(SEQS, SLOT.itemsize // 8)
    for name, dtype in (("draw", torch.bfloat16), ("draw, edited", torch.float32)):
        logits = torch.empty(SEQS, VOCAB, dtype=dtype, device=META)
        yield name, draw_launch(logits, _ints(SEQS), _ints(SEQS), records, _ints(2, SEQS))


def _row_launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[Launch]:
    x = torch.empty(TOKENS, shape.hidden, dtype=dtype, device=META)
    weight = torch.empty(shape.hidden, device=META)
    for residual in (None, x):
        yield norm_launch(x, residual, weight, 1e-5, x)
    gate_up = torch.empty(TOKENS, 2 * shape.mlp, dtype=dtype, device=META)
    for activation in Activation:
        yield gated_launch(gate_up, activation, gate_up[:, : shape.mlp])


def _write_launches(shape: ModelShape, slab: KvSlab) -> Iterator[Launch]:
    spec, dtype = shape.spec, shape.dtype
    heads = spec.num_heads + 2 * spec.num_kv_heads
    qkv = torch.empty(TOKENS, heads * spec.head_dim, dtype=dtype, device=META)
    table = torch.empty(MAX_LEN, (shape.rotary_dim or spec.head_dim) // 2, device=META)
    weight = torch.empty(spec.head_dim, device=META)
    norm = HeadNorm(weight, weight, 1e-6) if shape.head_norm else None
    rotary = Rotary(table, table)
    slots = _longs(TOKENS)
    yield rotate_launch(qkv, slots, rotary, norm, spec, slab, 3, slots, torch.empty_like(qkv))
    k = torch.empty(TOKENS, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=META)
    yield write_launch(k, k, slab, 3, slots)


def _batch(group: GroupBatch, num_seqs: int, num_decode: int, max_query_len: int) -> StepBatch:
    return StepBatch(
        token_ids=_longs(SEQS),
        positions=_longs(SEQS),
        query_starts=_ints(num_seqs + 1),
        kv_lens=_ints(num_seqs),
        groups=(group,),
        num_decode=num_decode,
        max_query_len=max_query_len,
        max_kv_len=MAX_LEN,
    )


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int32, device=META)


def _longs(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int64, device=META)
