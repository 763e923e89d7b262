"""The second pass of decode attention: adds up the segments that several programs held in part."""

import triton
import triton.language as tl

from engine.kernels.triton.segments import segment_at, segment_ends, share_of


@triton.jit(do_not_specialize=["num_seqs", "num_programs"])
def merge_kernel(
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_seqs: tl.tensor,
    num_programs: tl.tensor,  # of the first pass
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    PARTS: tl.constexpr,  # added at a time
) -> None:
    """Program (p, row): one row of the segment that the first pass's program p began and left."""
    GROUP: tl.constexpr = NUM_HEADS // KV_HEADS
    CHUNKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    owner, row = tl.program_id(0), tl.program_id(1)
    ends = segment_ends(kv_lens_ptr, num_seqs, SEQS, TOKENS, WINDOW)
    stretch = tl.max(ends, 0)
    line = stretch * (KV_HEADS * CHUNKS)
    share = share_of(line, num_programs, MIN_SHARE)
    stop = (owner + 1) * share
    if stop >= line:
        return
    chunk = (stop - 1) // stretch
    seq, begin, end = segment_at(ends, stop - 1 - chunk * stretch)
    begin, end = begin + chunk * stretch, end + chunk * stretch
    if (begin < owner * share) | (end <= stop):
        return
    member = chunk % CHUNKS * ROWS + row
    if member >= GROUP:
        return
    vdims = tl.arange(0, VALUE_BLOCK)
    highest = tl.full([], -1.0e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([VALUE_BLOCK], tl.float32)
    for start in range(owner, (end - 1) // share + 1, PARTS):
        programs = start + tl.arange(0, PARTS)
        valid = programs <= (end - 1) // share
        part = programs * 2 + (programs == owner).to(tl.int32)
        maxima = tl.load(stats_ptr + part * 2 * ROWS + row, mask=valid, other=-1.0e30)
        sums = tl.load(stats_ptr + part * 2 * ROWS + ROWS + row, mask=valid, other=0.0)
        rows = (part * ROWS + row)[:, None] * VALUE_DIM
        mask = valid[:, None] & (vdims < VALUE_DIM)[None, :]
        values = tl.load(partial_ptr + rows + vdims[None, :], mask=mask, other=0.0)
        higher = tl.maximum(highest, tl.max(maxima, 0))
        weights = tl.exp2(maxima - higher)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights * sums, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        highest = higher
    head = seq.to(tl.int64) * NUM_HEADS + chunk // CHUNKS * GROUP + member
    out = (acc / tl.maximum(total, 1.0e-30)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head * VALUE_DIM + vdims, out, mask=vdims < VALUE_DIM)
