"""The prefill attention kernel beside torch's own on the same numbers."""

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.bench import Bench, relative_error
from benchmarks.gpu.decode_attention import BLOCK_SIZE, BOUND, LLAMA, SMOKE_SPEC
from benchmarks.gpu.inputs import (
    Paged,
    layout_of,
    num_blocks,
    paged,
    random_queries,
    random_slab,
)
from engine.kernels.interface import AttentionSpec
from engine.kernels.reference import KEYS, VALUES, cached_rows

GOAL = 0.60
LAYER = 1
CASES = ((2048, 2048), (8192, 8192), (2048, 8192))  # (new tokens, all tokens)
SMOKE_CASES = ((20, 30),)


def run(bench: Bench) -> None:
    spec, kernels = SMOKE_SPEC if bench.smoke else LLAMA, bench.kernels()
    for new, total in SMOKE_CASES if bench.smoke else CASES:
        q, made = one_prompt(bench, spec, new, total)
        run_ours = partial(kernels.attention, q, spec, made.slab, LAYER, made.batch, made.group)
        k, v = (
            cached_rows(made.slab, LAYER, plane, made.group.block_tables[0], total)
            for plane in (KEYS, VALUES)
        )
        dense_q, dense_k, dense_v = (t.transpose(0, 1)[None].contiguous() for t in (q, k, v))
        name = f"{new} new of {total}"
        expected = _expected(dense_q, dense_k, dense_v)
        bench.check(name, relative_error(run_ours(), expected), BOUND[bench.dtype])
        limit_s = least_s(bench, spec, new, total)
        theirs = None
        if new == total:  # torch's causal mask is of the first tokens, not of the last
            theirs_of = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
            run_theirs = partial(theirs_of, dense_q, dense_k, dense_v)
            theirs = bench.seconds(run_theirs)
            bench.figure(f"{name}, torch's", "us", theirs * 1e6, limit=limit_s * 1e6)
        seconds = bench.seconds(run_ours)
        bench.figure(name, "us", seconds * 1e6, limit=limit_s * 1e6, goal=GOAL)
        if theirs is not None:
            bench.figure(
                f"{name}, speed over torch's", "x", theirs / seconds, share=theirs / seconds,
                share_of="torch's",
            )  # fmt: skip


def one_prompt(
    bench: Bench, spec: AttentionSpec, new: int, total: int
) -> tuple[torch.Tensor, Paged]:
    """Queries of its new tokens, and a cache of two layers."""
    lengths = [(new, total)]
    layout = layout_of(spec, LAYER + 1, BLOCK_SIZE, bench.dtype)
    slab = random_slab(layout, num_blocks(lengths, BLOCK_SIZE), bench.device)
    return random_queries(spec, new, bench.dtype, bench.device), paged(slab, lengths)


def least_s(bench: Bench, spec: AttentionSpec, new: int, total: int) -> float:
    """For both products, of what the causal mask leaves."""
    pairs = new * (total - new) + new * (new + 1) / 2
    flops = 2 * spec.num_heads * (spec.head_dim + spec.value_dim) * pairs
    return flops / bench.limits.gemm_flops_s


def _expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, width] in fp32, a head at a time."""
    new, total = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    heads = []
    for head in range(q.shape[1]):
        keys, values = k[0, head // group].float(), v[0, head // group].float()
        scores = q[0, head].float() @ keys.T * q.shape[-1] ** -0.5
        heads.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values)
    return torch.stack(heads, 1)
