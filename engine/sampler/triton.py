"""The GPU twin of `Sampler`: one program draws one token, without a sort and without scratch.

Filters are found by passes over the row, which stays in the second-level cache: a selection by
bisection for top-k, and for top-p the sum of what is nearer than the winner.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import Launch
from engine.sampler import definition as d
from engine.sampler.edits import edited_logits, is_edited
from engine.sampler.interface import Draws, DrawStatus, History, Logprobs, Sampled
from engine.sampler.logprobs import token_logprobs
from engine.sampler.table import SLOT, SamplingTable
from engine.staging import Staging

BLOCK = 2048  # tokens of a pass at once
WARPS = 8

_LOG2_E, _ROUND = tl.constexpr(d.LOG2_E), tl.constexpr(d.ROUND)
_LN2, _LN2_HIGH, _LN2_LOW = map(tl.constexpr, (d.LN2, d.LN2_HIGH, d.LN2_LOW))
_EXP, _LOG = tl.constexpr(d.EXP), tl.constexpr(d.LOG)
_T_MAX, _WEIGHT_ONE = tl.constexpr(d.T_MAX), tl.constexpr(d.WEIGHT_ONE)
_MAX_DISTANCE, _DOMAIN = tl.constexpr(d.MAX_DISTANCE), tl.constexpr(d.DOMAIN)
_NOT_FINITE = tl.constexpr(int(DrawStatus.NOT_FINITE))
_NO_CANDIDATE = tl.constexpr(int(DrawStatus.NO_CANDIDATE))
_INFINITY, _INT32_MAX = tl.constexpr(float("inf")), tl.constexpr(2**31 - 1)


def _word_of(column: str, num_bytes: int = 4) -> Any:
    return tl.constexpr(SLOT.fields[column][1] // num_bytes)  # type: ignore[index]


_ROW_WORDS = tl.constexpr(SLOT.itemsize // 4)
_SEED, _TOP_P = _word_of("seed", 8), _word_of("top_p", 8)
_SCALE, _FARTHEST = _word_of("inverse_temperature"), _word_of("max_distance")
_CHOICE, _TOP_K = _word_of("choice"), _word_of("top_k")


@triton.jit
def exp(a: tl.tensor) -> tl.tensor:
    n = (a * _LOG2_E + _ROUND) - _ROUND
    r = (a - n * _LN2_HIGH) - n * _LN2_LOW
    p = a * 0.0 + _EXP[0]
    for i in tl.static_range(1, 7):
        p = p * r + _EXP[i]
    return p * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponential(words: tl.tensor) -> tl.tensor:
    """-log(1 - t) of 32 random bits."""
    t = ((words >> 1).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    t = tl.minimum(t, _T_MAX)
    s = 1.0 - t
    k = tl.maximum(126 - (s.to(tl.int32, bitcast=True) >> 23), 0)
    f = tl.where(k == 0, t, 1.0 - s * ((k + 127) << 23).to(tl.float32, bitcast=True))
    p = f * 0.0 + _LOG[0]
    for i in tl.static_range(1, 9):
        p = p * f + _LOG[i]
    return k.to(tl.float32) * _LN2 + f * p


@triton.jit
def logits_at(row_ptr: tl.tensor, tokens: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    return tl.load(row_ptr + tokens, mask=tokens < vocab, other=-_INFINITY).to(tl.float32)


@triton.jit
def argmax(row_ptr: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """(greatest logit, the first token that has it, how many are NaN or +inf).

    Every lane keeps what it saw, as in the passes below: lanes meet once, not at every tile.
    """
    best = tl.full([BLOCK], -_INFINITY, tl.float32)
    winner, broken = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        z = logits_at(row_ptr, tokens, vocab)
        sound = z < _INFINITY  # not so for NaN
        broken += tl.where(sound, 0, 1)
        better = sound & (z > best)
        winner = tl.where(better, tokens, winner)
        best = tl.where(better, z, best)
    highest = tl.max(best, 0)
    first = tl.min(tl.where(best == highest, winner, _INT32_MAX), 0)
    return highest, first, tl.sum(broken, 0)


@triton.jit
def distances(
    row_ptr: tl.tensor, tokens: tl.tensor, vocab: tl.tensor, best: tl.tensor, scale: tl.tensor
) -> tl.tensor:
    return (best - logits_at(row_ptr, tokens, vocab)) * scale


@triton.jit
def mass(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    limit: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Sum of the weights of tokens up to the limit, given as a distance's bits."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        y = distances(row_ptr, start + tl.arange(0, BLOCK), vocab, best, scale)
        weight = (exp(-tl.minimum(y, _MAX_DISTANCE)) * _WEIGHT_ONE).to(tl.int64)
        total += tl.where(y.to(tl.int32, bitcast=True) <= limit, weight, 0)
    return tl.sum(total, 0)


@triton.jit
def kth_distance(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    k: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Bits of the k-th smallest distance: the greatest number with fewer than k below it."""
    kth = tl.zeros((), tl.int32)
    for step in range(0, 31):
        trial = kth | (1 << (30 - step))
        below = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            y = distances(row_ptr, tokens, vocab, best, scale).to(tl.int32, bitcast=True)
            below += tl.where((y < trial) & (tokens < vocab), 1, 0)
        kth = tl.where(tl.sum(below, 0) < k, trial, kth)
    return kth


@triton.jit
def race(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    limit: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    choice: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """(token, bits of its distance): argmin of E * exp(y) up to the limit."""
    least = tl.full([BLOCK], _INFINITY, tl.float32)
    winner, distance = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        quarters = start // 4 + tl.arange(0, BLOCK // 4)
        zero = quarters * 0
        words = tl.philox(seed, quarters, zero + position, zero + choice, zero + _DOMAIN)
        even, odd = tl.interleave(words[0], words[2]), tl.interleave(words[1], words[3])
        noise = exponential(tl.interleave(even, odd))
        tokens = start + tl.arange(0, BLOCK)
        y = distances(row_ptr, tokens, vocab, best, scale)
        bits = y.to(tl.int32, bitcast=True)
        results = noise * exp(tl.minimum(y, _MAX_DISTANCE))
        results = tl.where(bits <= limit, results, _INFINITY)
        sooner = results < least
        winner = tl.where(sooner, tokens, winner)
        distance = tl.where(sooner, bits, distance)
        least = tl.where(sooner, results, least)
    first = tl.min(least, 0)
    token = tl.min(tl.where(least == first, winner, _INT32_MAX), 0)
    won = (least == first) & (winner == token)
    return token, tl.min(tl.where(won, distance, _INT32_MAX), 0)


@triton.jit
def draw_kernel(
    logits_ptr: tl.tensor,  # [rows, vocab]
    logit_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,  # [draws]
    ints_ptr: tl.tensor,  # [draws, words]: SLOT, as int32
    floats_ptr: tl.tensor,  # the same memory
    longs_ptr: tl.tensor,
    doubles_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [2, draws]: token ids and status
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(logit_rows_ptr + i).to(tl.int64) * vocab
    scale = tl.load(floats_ptr + i * _ROW_WORDS + _SCALE)
    best, token, broken = argmax(row_ptr, vocab, BLOCK)
    status = tl.where(best == -_INFINITY, _NO_CANDIDATE, 0)
    status = tl.where(broken > 0, _NOT_FINITE, status)
    if (scale > 0.0) & (status == 0):
        best += 0.0  # -0 would make distances of -0
        farthest = tl.minimum(tl.load(floats_ptr + i * _ROW_WORDS + _FARTHEST), _MAX_DISTANCE)
        limit = farthest.to(tl.int32, bitcast=True)
        top_k = tl.load(ints_ptr + i * _ROW_WORDS + _TOP_K)
        if (top_k > 0) & (top_k < vocab):
            limit = tl.minimum(limit, kth_distance(row_ptr, vocab, best, scale, top_k, BLOCK))
        top_p = tl.load(doubles_ptr + i * (_ROW_WORDS // 2) + _TOP_P)
        budget = top_p * 0.0
        if top_p < 1.0:
            budget = top_p * mass(row_ptr, vocab, best, scale, limit, BLOCK).to(tl.float64)
        seed = tl.load(longs_ptr + i * (_ROW_WORDS // 2) + _SEED)
        position = tl.load(positions_ptr + i)
        choice = tl.load(ints_ptr + i * _ROW_WORDS + _CHOICE)
        # A winner that top-p turns down rules out all that are no nearer.
        accepted = 0
        while accepted == 0:
            token, distance = race(
                row_ptr, vocab, best, scale, limit, seed, position, choice, BLOCK
            )
            accepted = 1
            if (top_p < 1.0) & (distance > 0):
                nearer = mass(row_ptr, vocab, best, scale, distance - 1, BLOCK)
                accepted = tl.where(nearer.to(tl.float64) < budget, 1, 0)
                limit = distance - 1
    tl.store(out_ptr + i, tl.where(status == 0, token, 0))
    tl.store(out_ptr + tl.num_programs(0) + i, status)


class TritonSampler:
    """Waits for nothing on the device; uploads some 100 bytes a draw, all by one copy."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table
        self._staging: Staging | None = None  # made for the first logits' device

    def sample(
        self,
        logits: torch.Tensor,
        draws: Draws,
        history: History,
        bitmask: torch.Tensor | None = None,
    ) -> Sampled:
        device, rows = logits.device, self._table.rows[draws.slots]
        if self._staging is None:
            self._staging = Staging(device)
        source, slots, records = self._staging.put(
            [draws.logit_rows, draws.slots, rows.view(np.int64)]
        )
        positions = history.num_tokens[slots]
        if is_edited(rows, bitmask):
            z = edited_logits(logits, draws, self._table, history, bitmask)
            every = torch.arange(len(rows), dtype=torch.int32, device=device)
            drawn = _draw(z, every, positions, records)
            broken = ~(logits[source] < torch.inf).all(1)  # a mask may have hidden it
            drawn[0].masked_fill_(broken, 0)
            drawn[1].masked_fill_(broken, DrawStatus.NOT_FINITE)
        else:
            drawn = _draw(logits, source, positions, records)
        reported, logprobs = self._table.num_reported(draws.slots), None
        if reported > 0:
            logprobs = token_logprobs(logits[source], drawn[0], reported - 1)
        return Sampled(drawn, logprobs)

    def token_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> Logprobs:
        return token_logprobs(logits, targets, num_top)


def _draw(
    logits: torch.Tensor, logit_rows: torch.Tensor, positions: torch.Tensor, records: torch.Tensor
) -> torch.Tensor:
    """[2, draws]: token ids and status."""
    out = torch.empty(2, len(logit_rows), dtype=torch.int32, device=logits.device)
    draw_launch(logits.contiguous(), logit_rows, positions, records, out).run()
    return out


def draw_launch(
    logits: torch.Tensor,  # [rows, vocab]
    logit_rows: torch.Tensor,  # [draws]
    positions: torch.Tensor,
    records: torch.Tensor,  # rows of SLOT
    out: torch.Tensor,
) -> Launch:
    """Not fused: one rounding for each operation, as the definition has it."""
    kinds = (torch.int32, torch.float32, torch.int64, torch.float64)
    records_of = (records.view(kind) for kind in kinds)
    args = (logits, logit_rows, positions, *records_of, out, logits.shape[1])
    constants: dict[str, object] = {"BLOCK": BLOCK}
    return Launch(draw_kernel, (len(logit_rows),), args, constants, WARPS, fused=False)
