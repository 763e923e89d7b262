"""Reading rows of logits: extremes, argmax, distances. Logits are seen as int16 or int32 bits.

A float's bits, sign and magnitude, become a two's complement number (the *key*) that sorts as
the float does, -0 equal to +0. Loops run over slices from 0, where Numba can drop its handling
of negative indices: with it LLVM gathers instead of loading vectors (ten times slower).
"""

from typing import Any

import numpy as np

from engine.sampler.cpu.arithmetic import INFINITY_BITS, F, float_bits, widen
from engine.sampler.cpu.jit import compiled
from engine.sampler.cpu.memory import CHUNK, Array

_SPAN = 1024  # tokens between two looks at the best so far


@compiled
def lowest_of(shift: Any) -> Any:
    """Bits of -0 as an integer, from which negative floats count downwards."""
    return -(1 << (31 - shift))


@compiled
def _extremes(bits: Array, lowest: Any) -> Any:
    top = bits.dtype.type(lowest)
    bottom = bits.dtype.type(-1 - lowest)
    for i in range(bits.size):
        b = bits[i]
        key = bits.dtype.type(b if b >= 0 else lowest - b)
        top = key if key > top else top
        bottom = key if key < bottom else bottom
    return top, bottom


@compiled
def scan(bits: Array, shift: Any) -> Any:
    """(greatest key, least key, where to search for the greatest: the start of its span)."""
    lowest = lowest_of(shift)
    top, bottom, start = lowest, -1 - lowest, 0
    for begin in range(0, bits.size, _SPAN):
        high, low = _extremes(bits[begin : begin + _SPAN], lowest)
        if high > top:
            top, start = np.int64(high), begin
        bottom = min(bottom, np.int64(low))
    return top, bottom, start


@compiled
def finite(top: Any, bottom: Any, shift: Any) -> Any:
    """No NaN and no +inf: their keys lie beyond those of the infinities."""
    infinity = INFINITY_BITS >> shift
    return top < infinity and bottom >= -infinity


@compiled
def first_at(bits: Array, shift: Any, top: Any, start: Any) -> Any:
    lowest = lowest_of(shift)
    span = bits[start:]
    for i in range(span.size):
        b = np.int64(span[i])
        if (b if b >= 0 else lowest - b) == top:
            return start + i
    return -1  # not reached: `scan` saw it


@compiled
def float_of(key: Any, shift: Any) -> Any:
    """The float of a key, +0 for both zeros."""
    return widen(key if key >= 0 else lowest_of(shift) - key, shift)


@compiled
def distances(bits: Array, shift: Any, best: Any, scale: Any, y: Array, nearest: Array) -> None:
    """y = (best - logit) * scale, padded with infinity, and the least of each chunk, as bits."""
    for chunk in range(nearest.size):
        source = bits[chunk * CHUNK : (chunk + 1) * CHUNK]
        target = y[chunk * CHUNK : (chunk + 1) * CHUNK]
        least = np.int32(INFINITY_BITS)
        for i in range(source.size):
            value = (best - widen(source[i], shift)) * scale
            target[i] = value
            value_bits = float_bits(value)
            least = value_bits if value_bits < least else least
        for i in range(source.size, CHUNK):
            target[i] = F(np.inf)
        nearest[chunk] = least
