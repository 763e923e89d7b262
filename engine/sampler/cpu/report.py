"""Log-probabilities of chosen tokens and of the best of a row."""

import math
from typing import Any

import numpy as np

from engine.kernels.cpu.memory import claim, word
from engine.sampler import definition as d
from engine.sampler.cpu.arithmetic import INFINITY_BITS, F, float_bits
from engine.sampler.cpu.jit import compiled
from engine.sampler.cpu.job import ENTRIES, OWN, bf16_row, entry_of, fp32_row, own_scratch
from engine.sampler.cpu.memory import CHUNK, Array, Scratch, floats, int32s
from engine.sampler.cpu.race import kth_distance, masses
from engine.sampler.cpu.rows import distances, finite, float_of, scan

NUM_WORDS = OWN + 6
(
    TARGETS,  # int32 [entries]
    NUM_TOP,
    LOGPROBS,  # fp32 [entries]
    RANKS,  # int32 [entries]
    TOP_IDS,  # int32 [entries, num_top]
    TOP_LOGPROBS,  # fp32 [entries, num_top]
) = range(OWN, NUM_WORDS)

_INFINITY = np.int32(INFINITY_BITS)


def report_bf16(job: Any) -> None:
    own = own_scratch(job)
    i = claim(job, 1)
    while i < word(job, ENTRIES):
        _report(job, i, bf16_row(job, i), 16, own)
        i = claim(job, 1)


def report_fp32(job: Any) -> None:
    own = own_scratch(job)
    i = claim(job, 1)
    while i < word(job, ENTRIES):
        _report(job, i, fp32_row(job, i), 0, own)
        i = claim(job, 1)


@compiled
def _report(job: Any, i: Any, bits: Array, shift: Any, own: Scratch) -> None:
    entries, num_top = word(job, ENTRIES), word(job, NUM_TOP)
    target = entry_of(job, TARGETS, i)
    logprobs, ranks = floats(word(job, LOGPROBS), entries), int32s(word(job, RANKS), entries)
    top_ids = int32s(word(job, TOP_IDS) + i * num_top * 4, num_top)
    top_logprobs = floats(word(job, TOP_LOGPROBS) + i * num_top * 4, num_top)
    top, bottom, _ = scan(bits, shift)
    if not finite(top, bottom, shift) or top == -(INFINITY_BITS >> shift):
        logprobs[i], ranks[i] = F(np.nan), 0
        top_ids[:], top_logprobs[:] = 0, F(np.nan)
        return
    y = own.y
    distances(bits, shift, float_of(top, shift), F(1.0), y, own.nearest)
    _, total = masses(y, own.nearest, _INFINITY, _INFINITY)
    log_total = math.log(np.float64(total) / d.WEIGHT_ONE)
    logprobs[i] = F(-np.float64(y[target]) - log_total)
    ranks[i] = 1 + _count_nearer(y, y[target])
    if num_top > 0:
        _best(y, own.nearest, kth_distance(own, num_top), top_ids)
        for k in range(num_top):
            top_logprobs[k] = F(-np.float64(y[top_ids[k]]) - log_total)


@compiled
def _count_nearer(y: Array, distance: Any) -> Any:
    count = 0
    for i in range(y.size):
        count += y[i] < distance
    return count


@compiled
def _best(y: Array, nearest: Array, limit: Any, top_ids: Array) -> None:
    """The tokens up to the limit, nearest first; of equal ones the lower ids, as many as fit."""
    count = 0
    for chunk in range(nearest.size):
        if nearest[chunk] > limit:
            continue
        for token in range(chunk * CHUNK, (chunk + 1) * CHUNK):
            if float_bits(y[token]) > limit or (
                count == top_ids.size and y[token] >= y[top_ids[count - 1]]
            ):
                continue
            at = min(count, top_ids.size - 1)
            while at > 0 and y[token] < y[top_ids[at - 1]]:
                top_ids[at] = top_ids[at - 1]
                at -= 1
            top_ids[at] = token
            count = min(count + 1, top_ids.size)
