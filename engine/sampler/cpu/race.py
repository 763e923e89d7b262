"""Choosing among the tokens of one row by their distances; see engine.sampler.definition.

Distances are not negative, so their bits sort as they do; a limit is such bits, inclusive.
"""

import math
from typing import Any

import numpy as np

from engine.sampler import definition as d
from engine.sampler.cpu.arithmetic import INFINITY_BITS, F, exp, exponential, float_bits, weight
from engine.sampler.cpu.jit import compiled
from engine.sampler.cpu.memory import CHUNK, Array, Scratch
from engine.sampler.cpu.philox import fill

_MAX_DISTANCE = F(d.MAX_DISTANCE)
# The noise is at least t, so that bits above this share of the best result cannot win; the
# factor covers the rounding of the functions on the way.
_BITS_BOUND = F(2.0**31 * 1.001)
_REACH_MARGIN = 32 * math.log(2) + 0.01


@compiled
def masses(y: Array, nearest: Array, inner: Any, outer: Any) -> Any:
    """Sums of the weights of tokens up to two limits, of which `outer` is not the nearer one."""
    within, total = np.int64(0), np.int64(0)
    for chunk in range(nearest.size):
        if nearest[chunk] <= outer:
            part = y[chunk * CHUNK : (chunk + 1) * CHUNK]
            for i in range(CHUNK):
                distance, w = float_bits(part[i]), weight(part[i])
                total += w if distance <= outer else np.int64(0)
                within += w if distance <= inner else np.int64(0)
    return within, total


@compiled
def select(keys: Array, k: Any, histogram: Array) -> Any:
    """The k-th smallest of keys >= 0, digit by digit from the top."""
    prefix = np.int64(0)
    for shift in (24, 16, 8, 0):
        histogram[:] = 0
        for i in range(keys.size):
            if keys[i] >> (shift + 8) == prefix:
                histogram[(keys[i] >> shift) & 255] += 1
        digit = 0
        while k > histogram[digit]:
            k -= histogram[digit]
            digit += 1
        prefix = (prefix << 8) | digit
    return np.int32(prefix)


@compiled
def gather(y: Array, nearest: Array, limit: Any, keys: Array) -> Any:
    """Bits of the distances up to the limit, by token id; returns their number."""
    count = 0
    for chunk in range(nearest.size):
        if nearest[chunk] <= limit:
            part = y[chunk * CHUNK : (chunk + 1) * CHUNK]
            for i in range(CHUNK):
                key = float_bits(part[i])
                if key <= limit:
                    keys[count] = key
                    count += 1
    return count


@compiled
def kth_distance(own: Scratch, k: Any) -> Any:
    """Bits of the k-th smallest distance. The k-th best chunk bounds it from above."""
    bound = np.int32(INFINITY_BITS)
    if k <= own.nearest.size:
        bound = select(own.nearest, k, own.histogram)
    count = gather(own.y, own.nearest, bound, own.keys)
    return select(own.keys[:count], k, own.histogram)


@compiled
def race_chunk(
    y: Array, first_token: Any, bits: Array, limit: Any, least: Any, best: Any, winner: Any
) -> Any:
    """Goes through one chunk, `least` its least distance; returns the better (result, token)."""
    cut = best * exp(-least) * _BITS_BOUND
    lowest = np.int32(0x7FFFFFFF)
    for i in range(CHUNK):
        lowest = bits[i] if bits[i] < lowest else lowest
    if F(lowest) > cut:
        return best, winner
    for i in range(CHUNK):
        if F(bits[i]) <= cut and float_bits(y[i]) <= limit:
            result = exponential(bits[i]) * exp(y[i])
            token = first_token + i
            if result < best or (result == best and token < winner):
                best, winner = result, token
    return best, winner


@compiled
def race(own: Scratch, limit: Any, seed: Any, position: Any, choice: Any) -> Any:
    """argmin of E * exp(y) up to the limit, beginning where the best token is: with its result
    most other tokens are out by their random bits alone, and far chunks without any."""
    nearest, bits = own.nearest, own.bits
    start = 0
    while nearest[start] != 0:
        start += 1
    best, winner, reach = F(np.inf), np.int64(own.y.size), limit
    for turn in range(-1, nearest.size):
        chunk = start if turn < 0 else turn
        if nearest[chunk] > reach or turn == start:
            continue
        fill(chunk * CHUNK, seed, position, choice, bits)
        part = own.y[chunk * CHUNK : (chunk + 1) * CHUNK]
        least = np.int32(nearest[chunk]).view(np.float32)
        old = best
        best, winner = race_chunk(part, chunk * CHUNK, bits, limit, least, best, winner)
        if best < old:
            far = F(math.log(best) + _REACH_MARGIN)
            reach = min(limit, float_bits(max(far, F(0.0))))
    return winner


@compiled
def draw(own: Scratch, row: Any, position: Any) -> Any:
    """The token of one row. A winner that top-p turns down rules out all that are no nearer."""
    y, nearest = own.y, own.nearest
    limit = float_bits(min(row.max_distance, _MAX_DISTANCE))
    if 0 < row.top_k < own.logits.size:
        limit = min(limit, kth_distance(own, row.top_k))
    outer, budget = limit, np.inf  # of weight, not known until a winner needs it
    while True:
        token = race(own, limit, row.seed, position, row.choice)
        nearer = np.int32(float_bits(y[token]) - 1)
        if row.top_p >= 1.0 or nearer < 0:
            return token
        within, total = masses(y, nearest, nearer, outer)
        if budget == np.inf:
            budget = row.top_p * np.float64(total)
        if np.float64(within) < budget:
            return token
        limit = outer = nearer
