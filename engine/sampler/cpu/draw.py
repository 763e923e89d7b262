"""The compiled draw of a batch. Threads claim draws one by one, so uneven ones even out."""

from typing import Any

import numpy as np

from engine.kernels.cpu.memory import claim, word
from engine.sampler.cpu.arithmetic import INFINITY_BITS
from engine.sampler.cpu.edits import Lists, edit, is_edited
from engine.sampler.cpu.jit import compiled
from engine.sampler.cpu.job import (
    ENTRIES,
    LOGIT_ROWS,
    OWN,
    bf16_row,
    entry_of,
    fp32_row,
    own_scratch,
)
from engine.sampler.cpu.memory import Array, Scratch, int32s, slot_at
from engine.sampler.cpu.race import draw
from engine.sampler.cpu.rows import distances, finite, first_at, float_of, scan
from engine.sampler.interface import DrawStatus

NUM_WORDS = OWN + 12
(
    SLOTS,  # int32 [draws]
    TABLE,  # rows of SLOT
    ALLOWED,
    BIAS,
    BIAS_VALUES,
    STOPS,
    BITMASK,  # int32 [rows, mask words]
    MASK_WORDS,  # 0: no bitmask
    TOKENS,  # int32 [slots, stride]
    TOKENS_STRIDE,
    NUM_TOKENS,  # int32 [slots]
    RESULTS,  # int32 [2, draws], token ids and status
) = range(OWN, NUM_WORDS)

_DRAWN, _NOT_FINITE = int(DrawStatus.DRAWN), int(DrawStatus.NOT_FINITE)
_NO_CANDIDATE = int(DrawStatus.NO_CANDIDATE)


def draw_bf16(job: Any) -> None:
    own = own_scratch(job)
    i = claim(job, 1)
    while i < word(job, ENTRIES):
        _draw(job, i, bf16_row(job, i), 16, own)
        i = claim(job, 1)


def draw_fp32(job: Any) -> None:
    own = own_scratch(job)
    i = claim(job, 1)
    while i < word(job, ENTRIES):
        _draw(job, i, fp32_row(job, i), 0, own)
        i = claim(job, 1)


@compiled
def _draw(job: Any, i: Any, bits: Array, shift: Any, own: Scratch) -> None:
    draws = word(job, ENTRIES)
    slot = entry_of(job, SLOTS, i)
    row = slot_at(word(job, TABLE), slot)
    position = entry_of(job, NUM_TOKENS, slot)
    if is_edited(row, position, word(job, MASK_WORDS) > 0):
        token, status, random = _settle_edited(job, i, bits, shift, row, position, own)
    else:
        token, status, random = _settle(bits, shift, row, own.y, own.nearest)
    if random:
        token = draw(own, row, position)
    results = int32s(word(job, RESULTS), 2 * draws)
    results[i], results[draws + i] = token, status


@compiled
def _settle_edited(
    job: Any, i: Any, bits: Array, shift: Any, row: Any, position: Any, own: Scratch
) -> Any:
    top, bottom, _ = scan(bits, shift)
    if not finite(top, bottom, shift):
        return 0, _NOT_FINITE, False
    slot, source = entry_of(job, SLOTS, i), entry_of(job, LOGIT_ROWS, i)
    mask = int32s(word(job, BITMASK) + source * word(job, MASK_WORDS) * 4, word(job, MASK_WORDS))
    tokens = int32s(word(job, TOKENS) + slot * word(job, TOKENS_STRIDE) * 4, position)
    lists = Lists(word(job, ALLOWED), word(job, BIAS), word(job, BIAS_VALUES), word(job, STOPS))
    edit(own.logits, bits, shift, row, lists, mask, tokens, own.counts)
    return _settle(own.logits.view(np.int32), 0, row, own.y, own.nearest)


@compiled
def _settle(bits: Array, shift: Any, row: Any, y: Array, nearest: Array) -> Any:
    """(token, status, whether the token is still to be drawn, by the distances left in y)."""
    top, bottom, start = scan(bits, shift)
    if not finite(top, bottom, shift):
        return 0, _NOT_FINITE, False
    if top == -(INFINITY_BITS >> shift):
        return 0, _NO_CANDIDATE, False
    if row.inverse_temperature == 0.0:
        return first_at(bits, shift, top, start), _DRAWN, False
    distances(bits, shift, float_of(top, shift), row.inverse_temperature, y, nearest)
    return 0, _DRAWN, True
