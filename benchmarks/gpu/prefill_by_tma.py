"""An attempt: prefill attention whose keys and values come by TMA, beside the kernel in use.

A tile of up to a block's tokens of one head is one run of the slab, so one descriptor over the
slab's rows serves every tile that no query masks. Compiled for sm_90 it takes 190 registers where
the kernel in use with the same tile takes 212, and no arithmetic on addresses. If it is faster on a
card, it belongs into `engine/kernels/triton/prefill.py`; if not, nowhere.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.gpu.bench import Bench, relative_error
from benchmarks.gpu.decode_attention import BOUND, LLAMA, SMOKE_SPEC
from benchmarks.gpu.inputs import Paged
from benchmarks.gpu.prefill_attention import LAYER, least_s, one_prompt
from engine.kernels.interface import AttentionSpec
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.paged import strides_of, tile_blocks
from engine.kernels.triton.softmax import attended, attention_constants
from engine.kernels.triton.tiles import AttentionTiles

CHOICES = (
    AttentionTiles(128, 64, 8, 2),
    AttentionTiles(128, 64, 8, 3),
    AttentionTiles(128, 64, 8, 4),
    AttentionTiles(64, 64, 4, 3),
)


def run(bench: Bench) -> None:
    spec, kernels = SMOKE_SPEC if bench.smoke else LLAMA, bench.kernels()
    for length in (40,) if bench.smoke else (2048, 8192):
        q, made = one_prompt(bench, spec, length, length)
        in_use = partial(kernels.attention, q, spec, made.slab, LAYER, made.batch, made.group)
        expected = in_use()
        limit_s = least_s(bench, spec, length, length)
        usual_s = bench.seconds(in_use)
        bench.figure(f"{length}, in use", "us", usual_s * 1e6, limit=limit_s * 1e6)
        out = torch.empty_like(q)
        for tiles in (AttentionTiles(16, 16, 4, 2),) if bench.smoke else CHOICES:
            attend = launch(q, spec, made, out, tiles).run
            out.fill_(torch.nan)
            attend()
            name = f"{length}, TMA, {'x'.join(map(str, tiles))}"
            bench.check(name, relative_error(out, expected), BOUND[bench.dtype])
            bench.figure(name, "us", bench.seconds(attend) * 1e6, limit=limit_s * 1e6)


def launch(
    q: torch.Tensor, spec: AttentionSpec, made: Paged, out: torch.Tensor, tiles: AttentionTiles
) -> Launch:
    """Heads of a power of two, neither window nor soft cap."""
    rows, tokens, warps, stages = tiles
    slab, batch, tables = made.slab, made.batch, made.group.block_tables
    descriptor = TensorDescriptor.from_tensor(
        slab.data.view(-1, spec.head_dim), [tokens, spec.head_dim]
    )
    constants = attention_constants(spec, slab, tiles)
    wanted = {name: constants[name] for name in by_tma_kernel.arg_names if name in constants}
    members = spec.num_heads // spec.num_kv_heads
    query_tiles = -(-batch.max_query_len // (rows // members))
    args = (
        q, descriptor, slab.data, tables, batch.query_starts, batch.kv_lens, out,
        tables.stride(0), *strides_of(slab, LAYER)[:4],
    )  # fmt: skip
    grid = (batch.num_seqs * spec.num_kv_heads, query_tiles)
    return Launch(by_tma_kernel, grid, args, wanted, warps, stages)


@triton.jit  # type: ignore[untyped-decorator]
def attended_unmasked(
    q: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    rows_desc: tl.tensor,
    table_ptr: tl.tensor,
    end: tl.tensor,
    kv_len: tl.tensor,
    block_rows: tl.tensor,
    k_row: tl.tensor,  # of block 0: the layer's keys of the KV head
    v_row: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    block = tile_blocks(table_ptr, 0, kv_len, BLOCK_SIZE, TOKENS)
    for tile in range(0, end):
        row = block * block_rows + tile * TOKENS % BLOCK_SIZE
        k = rows_desc.load([k_row + row, 0])
        v = rows_desc.load([v_row + row, 0])
        block = tile_blocks(table_ptr, (tile + 1) * TOKENS, kv_len, BLOCK_SIZE, TOKENS)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        higher = tl.maximum(highest, tl.max(scores, 1) * SCALE)
        weights = tl.exp2(scores * SCALE - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
        highest = higher
    return highest, total, acc


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def by_tma_kernel(
    q_ptr: tl.tensor,
    rows_desc: tl.tensor,  # the slab as rows of one token's keys or values
    slab_ptr: tl.tensor,
    table_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    k_offset: tl.tensor,
    v_offset: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Program (sequence and KV head, tile of queries), as in the kernel in use."""
    MEMBERS: tl.constexpr = NUM_HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // MEMBERS
    kv_head, seq = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    first_query = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    query_start = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - query_start
    if first_query >= num_queries:
        return
    kv_len = tl.load(kv_lens_ptr + seq)
    rows = tl.arange(0, ROWS)
    queries = first_query + rows // MEMBERS
    wanted = (queries < num_queries)[:, None]
    heads = (query_start + queries).to(tl.int64) * NUM_HEADS + kv_head * MEMBERS + rows % MEMBERS
    places = heads[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(q_ptr + places, mask=wanted, other=0.0)
    table_ptr += seq.to(tl.int64) * table_stride
    keys, values = k_offset + kv_head * head_stride, v_offset + kv_head * head_stride
    lowest = kv_len - num_queries + first_query
    begin = (lowest + 1) // TOKENS
    end = tl.cdiv(tl.minimum(lowest + QUERIES, kv_len), TOKENS)
    highest, total, acc = attended_unmasked(
        q, tl.full([ROWS], -1.0e30, tl.float32), tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, HEAD_DIM], tl.float32), rows_desc, table_ptr, begin, kv_len,
        block_stride // HEAD_DIM, keys // HEAD_DIM, values // HEAD_DIM,
        BLOCK_SIZE, SCALE, TOKENS,
    )  # fmt: skip
    highest, total, acc = attended(
        q, lowest + rows // MEMBERS, highest, total, acc, slab_ptr + keys, slab_ptr + values,
        None, table_ptr, begin, end, kv_len, block_stride, HEAD_DIM, HEAD_DIM, HEAD_DIM, HEAD_DIM,
        BLOCK_SIZE, 0, SCALE, 0.0, "ieee", TOKENS, True,
    )  # fmt: skip
    out = (acc / tl.maximum(total, 1.0e-30)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, out, mask=wanted)
