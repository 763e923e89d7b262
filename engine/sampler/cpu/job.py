"""The first words of every job here: rows of logits, and memory for each thread."""

from typing import Any

import numpy as np

from engine.kernels.cpu.memory import thread_number, word
from engine.sampler.cpu.jit import compiled
from engine.sampler.cpu.memory import int16s, int32s, scratch_at

(
    LOGITS,  # [rows, vocab], bf16 or fp32
    VOCAB,
    ENTRIES,  # pieces of work
    LOGIT_ROWS,  # int32 [entries]
    SCRATCH,
    SCRATCH_STRIDE,  # in bytes
    OWN,  # the first word of the job itself
) = range(7)


@compiled
def bf16_row(job: Any, entry: Any) -> Any:
    vocab = word(job, VOCAB)
    return int16s(word(job, LOGITS) + entry_of(job, LOGIT_ROWS, entry) * vocab * 2, vocab)


@compiled
def fp32_row(job: Any, entry: Any) -> Any:
    vocab = word(job, VOCAB)
    return int32s(word(job, LOGITS) + entry_of(job, LOGIT_ROWS, entry) * vocab * 4, vocab)


@compiled
def own_scratch(job: Any) -> Any:
    address = word(job, SCRATCH) + thread_number(job) * word(job, SCRATCH_STRIDE)
    return scratch_at(address, word(job, VOCAB))


@compiled
def entry_of(job: Any, array: Any, entry: Any) -> Any:
    """An element of an int32 array whose address is the job's word `array`."""
    return np.int64(int32s(word(job, array), entry + 1)[entry])
