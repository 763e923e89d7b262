"""How decode work is dealt out: every program gets the same number of tiles, whatever the lengths.

The tiles of all sequences and KV heads form one line, [head][sequence][tile]. Program p takes
the tiles p * share .. (p + 1) * share. A *segment* is what one sequence has in one head; those
that a program holds only in part are merged by a second pass. Only lengths on the device
decide, so one recorded CUDA graph serves any mix of lengths.
"""

import triton
import triton.language as tl


@triton.jit
def first_tile(kv_len: tl.tensor, TOKENS: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """The first tile that the last token of a sequence sees; WINDOW 0 sees all."""
    reach = kv_len
    if WINDOW > 0:
        reach = tl.minimum(kv_len, WINDOW)
    return (kv_len - reach) // TOKENS


@triton.jit
def segment_ends(
    kv_lens_ptr: tl.tensor,
    num_seqs: tl.tensor,
    SEQS: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Where the segment of every sequence ends inside one head's stretch of the line, [SEQS].

    An empty sequence has one tile too: its output has to be written.
    """
    seqs = tl.arange(0, SEQS)
    kv_lens = tl.load(kv_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    tiles = tl.maximum(tl.cdiv(kv_lens, TOKENS) - first_tile(kv_lens, TOKENS, WINDOW), 1)
    return tl.cumsum(tl.where(seqs < num_seqs, tiles, 0), 0)


@triton.jit
def share_of(line: tl.tensor, num_programs: tl.tensor, MIN_SHARE: tl.constexpr) -> tl.tensor:
    """Tiles of one program; a few at least, or merging costs more than it spreads."""
    return tl.maximum(tl.cdiv(line, num_programs), MIN_SHARE)


@triton.jit
def segment_at(ends: tl.tensor, place: tl.tensor) -> tl.tensor:
    """The sequence whose segment holds `place`, and where that segment begins and ends."""
    seq = tl.sum((ends <= place).to(tl.int32), 0)
    begin = tl.max(tl.where(ends <= place, ends, 0), 0)
    end = tl.min(tl.where(ends > place, ends, 2147483647), 0)
    return seq, begin, end
