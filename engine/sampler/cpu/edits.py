"""What a request changes in a row of logits before the draw, in this order: allowed tokens
and bitmask, bias, stops that come too early, penalties."""

from typing import Any, NamedTuple

import numpy as np

from engine.sampler.cpu.arithmetic import F, widen
from engine.sampler.cpu.jit import compiled
from engine.sampler.cpu.memory import Array, floats, int32s

_NEVER = F(-np.inf)


class Lists(NamedTuple):
    """Addresses of the flat lists into which the rows of a SamplingTable point."""

    allowed: int
    bias: int
    bias_values: int
    stops: int


@compiled
def is_edited(row: Any, num_tokens: Any, masked: Any) -> Any:
    early = row.stops_count > 0 and num_tokens < row.stops_from
    return masked or early or row.allowed_count > 0 or row.bias_count > 0 or row.penalized != 0


@compiled
def edit(
    z: Array,
    bits: Array,
    shift: Any,
    row: Any,
    lists: Lists,
    mask: Array,
    tokens: Array,
    counts: Array,
) -> None:
    """z: the processed logits. `counts` is zero before and after. `mask` may be empty."""
    _copy(z, bits, shift, int32s(lists.allowed + row.allowed_start * 4, row.allowed_count))
    if mask.size > 0:
        _apply_mask(z, mask)
    biased = int32s(lists.bias + row.bias_start * 4, row.bias_count)
    values = floats(lists.bias_values + row.bias_start * 4, row.bias_count)
    for i in range(biased.size):
        z[biased[i]] += values[i]
    if tokens.size < row.stops_from:
        for token in int32s(lists.stops + row.stops_start * 4, row.stops_count):
            z[token] = _NEVER
    if row.penalized != 0:
        _penalize(z, row, tokens, counts)


@compiled
def _copy(z: Array, bits: Array, shift: Any, allowed: Array) -> None:
    if allowed.size == 0:
        for i in range(z.size):
            z[i] = widen(bits[i], shift)
        return
    z[:] = _NEVER
    for token in allowed:
        z[token] = widen(bits[token], shift)


@compiled
def _apply_mask(z: Array, mask: Array) -> None:
    for i in range(z.size):
        if (mask[i >> 5] >> (i & 31)) & 1 == 0:
            z[i] = _NEVER


@compiled
def _penalize(z: Array, row: Any, tokens: Array, counts: Array) -> None:
    """Counts the output's tokens, then visits every token of the sequence once.

    Ids beyond the logits (a tokenizer's extra ones) have nothing to penalize.
    """
    for token in tokens[row.num_prompt_tokens :]:
        if 0 <= token < z.size:
            counts[token] += 1
    for token in tokens:
        if not 0 <= token < z.size or counts[token] < 0:
            continue
        value = z[token]
        value = value / row.repetition if value > 0 else value * row.repetition
        if counts[token] > 0:
            value = value - row.frequency * F(counts[token])
            value = value - row.presence
        z[token] = value
        counts[token] = -1  # visited
    for token in tokens:
        if 0 <= token < z.size:
            counts[token] = 0
