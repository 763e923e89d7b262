"""Every Triton kernel against the fp32 reference, on fresh random inputs; outputs start as NaN.

Quantised caches are `check_quantised`'s.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from benchmarks.gpu.bench import Bench, relative_error
from benchmarks.gpu.inputs import (
    Lengths,
    Paged,
    fill_with_nan,
    poisoned,
    random_queries,
)
from engine.kernels.interface import (
    NO_SLOT,
    Activation,
    AttentionSpec,
    HeadNorm,
    Rotary,
)
from engine.kernels.reference import KEYS, VALUES, ReferenceKernels, plane_view, scale_view
from engine.kernels.triton.kernels import TritonKernels
from kv_cache.slab import KvSlab

REFERENCE = ReferenceKernels()
# of the norm of the difference: fp32 sums in another order; operands rounded to bf16
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
LAYER = 1


class Shape(NamedTuple):
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 64
    window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None

    @property
    def spec(self) -> AttentionSpec:
        scale = self.head_dim**-0.5
        return AttentionSpec(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.value_dim or self.head_dim,
            scale,
            self.window,
            self.soft_cap,
        )


SHAPES = (
    Shape("llama-3.1-8b", 32, 8, 128),
    Shape("blocks of 16", 32, 8, 128, block_size=16),
    Shape("heads of 64", 32, 8, 64),
    Shape("phi-3, heads of 96", 32, 32, 96),
    Shape("gemma-2, window 500, cap 50", 16, 8, 256, window=500, soft_cap=50.0),
    Shape("one KV head, 80 queries", 80, 1, 128, block_size=32),
    Shape("heads of 192, values of 128", 16, 16, 192, value_dim=128),
)
SMOKE_SHAPES = (
    Shape("tiny", 4, 2, 16, block_size=16, window=20, soft_cap=30.0),
    Shape("tiny, values narrower", 2, 2, 24, block_size=16, value_dim=16),
)


def run(bench: Bench) -> None:
    kernels = bench.kernels()
    with poisoned_outputs():
        for dtype in dtypes(bench):
            for shape in SMOKE_SHAPES if bench.smoke else SHAPES:
                attention(bench, kernels, shape, dtype)
            _rows(bench, kernels, dtype)
            writes(bench, kernels, dtype)


def dtypes(bench: Bench) -> tuple[torch.dtype, ...]:
    return (bench.dtype,) if bench.smoke else (torch.bfloat16, torch.float32)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """torch.empty is NaN meanwhile."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _lengths(smoke: bool) -> dict[str, Lengths]:
    """Empty rows, as they fill up a graph, single tokens, ends of blocks, odd ones."""
    draw = random.Random(torch.seed())
    longest, count = (24, 2) if smoke else (3000, 40)
    odd = [draw.randrange(1, longest) for _ in range(count)]
    edges = [0, 33, 0] if smoke else [0, 1, 63, 64, 65, 0, 4096, 128]
    decode = [(1, kv_len) for kv_len in [*edges, *odd]]
    chunks = []
    for kv_len in [*odd, 1 if smoke else 2048]:
        new = draw.randrange(min(2, kv_len), kv_len + 1)
        chunks.append((new, kv_len))
    chunks = sorted(chunks, key=lambda pair: pair[0] != 1)
    return {"decode": decode, "prefill": chunks, "both": [*decode[-2:], *chunks[-3:]]}


def attention(
    bench: Bench,
    kernels: TritonKernels,
    shape: Shape,
    dtype: torch.dtype,
    format: str | None = None,
) -> None:
    spec = shape.spec
    for kind, lengths in _lengths(bench.smoke).items():
        size = shape.block_size
        made = poisoned(spec, lengths, size, dtype, bench.device, LAYER, format)
        q = random_queries(spec, made.batch.num_tokens, dtype, bench.device)
        out = kernels.attention(q, spec, made.slab, LAYER, made.batch, made.group)
        expected = _expected(q, spec, made)
        name = f"{kind} attention, {shape.name}, {_short(dtype, format)}"
        bench.check(name, relative_error(out, expected), BOUNDS[dtype])
        empty = made.batch.kv_lens[: made.batch.num_decode] == 0
        if bool(empty.any()):
            rows = out[: made.batch.num_decode][empty]
            bench.check(f"{name}, empty rows are 0", float(rows.abs().max()), 0.0)


def _expected(q: torch.Tensor, spec: AttentionSpec, made: Paged) -> torch.Tensor:
    """In fp32: the reference answers in the type of the queries."""
    return REFERENCE.attention(q.float(), spec, made.slab, LAYER, made.batch, made.group)


def _rows(bench: Bench, kernels: TritonKernels, dtype: torch.dtype) -> None:
    device, bound = bench.device, BOUNDS[dtype]
    tokens, sizes = (2, (48,)) if bench.smoke else (301, (4096, 2880, 1000))
    for hidden in sizes:
        x, residual = torch.randn(2, tokens, hidden, device=device).to(dtype)
        weight = torch.rand(hidden, device=device)
        expected = REFERENCE.rms_norm(x.float(), weight, 1e-5)
        error = relative_error(kernels.rms_norm(x, weight, 1e-5), expected)
        bench.check(f"norm of {hidden}, {_short(dtype)}", error, bound)
        summed = residual.clone()
        out = kernels.add_rms_norm(x, summed, weight, 1e-5)
        total = residual.float() + x.float()
        bench.check(f"sum of {hidden}, {_short(dtype)}", relative_error(summed, total), bound)
        expected = REFERENCE.rms_norm(total, weight, 1e-5)
        error = relative_error(out, expected)
        bench.check(f"norm of the sum of {hidden}, {_short(dtype)}", error, bound)
        gate_up = torch.randn(tokens, 2 * hidden, device=device).to(dtype)
        for activation in Activation:
            error = relative_error(
                kernels.gated_activation(gate_up, activation),
                REFERENCE.gated_activation(gate_up.float(), activation),
            )
            name = f"{activation.value} of {hidden}, {_short(dtype)}"
            bench.check(name, error, bound)


def writes(
    bench: Bench, kernels: TritonKernels, dtype: torch.dtype, format: str | None = None
) -> None:
    """Every fourth token has no slot."""
    device = bench.device
    head_dim, heads, kv_heads = (16, 4, 2) if bench.smoke else (128, 32, 8)
    tokens, positions = (5, 64) if bench.smoke else (777, 5000)
    shape = Shape("", heads, kv_heads, head_dim)
    spec = shape.spec
    made = poisoned(spec, [(tokens, tokens)], 64, dtype, device, LAYER, format)
    slots = made.group.slots[torch.randperm(tokens, device=device)].clone()
    slots[2::4] = NO_SLOT
    angles = torch.rand(positions, head_dim // 2, device=device) * 6.3
    rotary = Rotary(angles.cos(), angles.sin())
    weights = torch.rand(2, head_dim, device=device)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    where = torch.randint(0, positions, (tokens,), device=device)
    for norm in (None, HeadNorm(weights[0], weights[1], 1e-6)):
        queries: list[torch.Tensor] = []

        def turn(
            twin: TritonKernels | ReferenceKernels,
            slab: KvSlab,
            norm: HeadNorm | None = norm,
            queries: list[torch.Tensor] = queries,
        ) -> None:
            x = qkv.float() if twin is REFERENCE else qkv
            queries.append(twin.rotate_and_write(x, where, rotary, norm, spec, slab, LAYER, slots))

        name = f"rotation{'' if norm is None else ' and head norm'}, {_short(dtype, format)}"
        bound = BOUNDS[dtype if format is None else torch.bfloat16]
        _compare_slabs(bench, kernels, name, made, turn, bound)
        bench.check(f"{name}: queries", relative_error(*queries), BOUNDS[dtype])
    k, v = torch.randn(2, tokens, kv_heads, head_dim, device=device).to(dtype)

    def write(twin: TritonKernels | ReferenceKernels, slab: KvSlab) -> None:
        twin.write_kv(k, v, slab, LAYER, slots)

    # divisions on a GPU are off by a unit or two, and then a rounding may be off by one step
    bound = 0.0 if format is None else BOUNDS[torch.bfloat16]
    _compare_slabs(bench, kernels, f"write, {_short(dtype, format)}", made, write, bound)


def _compare_slabs(
    bench: Bench,
    kernels: TritonKernels,
    name: str,
    made: Paged,
    write: Callable[[TritonKernels | ReferenceKernels, KvSlab], None],
    bound: float,
) -> None:
    """Into slabs of NaN, so that what is written shows, and what is written besides."""
    slabs = [KvSlab(made.slab.layout, torch.empty_like(made.slab.data)) for _ in range(2)]
    for slab in slabs:
        fill_with_nan(slab)
    write(kernels, slabs[0])
    write(REFERENCE, slabs[1])
    ours, theirs = (_read(slab) for slab in slabs)
    written = ~theirs.isnan()
    bench.check(f"{name}: cache", relative_error(ours[written], theirs[written]), bound)
    bench.check(f"{name}: nothing else", float((~ours[~written].isnan()).sum()), 0.0)


def _read(slab: KvSlab) -> torch.Tensor:
    """All that it holds, as attention sees it."""
    if not slab.layout.format.quantised:
        return slab.data
    rows = [
        plane_view(slab, layer, plane).float() * scale_view(slab, layer, plane).unsqueeze(-1)
        for layer in range(slab.layout.num_layers)
        for plane in (KEYS, VALUES)
    ]
    return torch.cat([part.flatten() for part in rows])


def _short(dtype: torch.dtype, format: str | None = None) -> str:
    name = "fp32" if dtype == torch.float32 else "bf16"
    return name if format is None else f"{format} for {name}"
