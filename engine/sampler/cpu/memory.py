"""Memory as compiled code sees it: arrays at addresses, and the working memory of a thread."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from engine.sampler.cpu.jit import compiled, inlined
from engine.sampler.table import SLOT

Array = npt.NDArray[Any]

CHUNK = 128  # tokens that share a bound when drawing
_HISTOGRAM = 256


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.PointerType(ir.IntType(8)))

    return types.voidptr(types.int64), generate


@inlined
def int16s(address: int, count: int) -> Any:
    return carray(_pointer(address), (count,), np.int16)


@inlined
def int32s(address: int, count: int) -> Any:
    return carray(_pointer(address), (count,), np.int32)


@inlined
def floats(address: int, count: int) -> Any:
    return carray(_pointer(address), (count,), np.float32)


@inlined
def slot_at(table: int, slot: int) -> Any:
    """A row of a SamplingTable."""
    return carray(_pointer(table), (slot + 1,), SLOT)[slot]


class Scratch(NamedTuple):
    """Working memory of one thread, for rows of a given length."""

    logits: Array  # fp32, processed
    y: Array  # fp32, distances, whole chunks
    nearest: Array  # int32, bits of each chunk's least distance
    keys: Array  # int32, candidates of a selection
    counts: Array  # int32, by token, zero between uses
    histogram: Array  # int32
    bits: Array  # int32 [CHUNK], random


def scratch_words(vocab_size: int) -> int:
    """How many 4-byte words one thread needs."""
    chunks = -(-vocab_size // CHUNK)
    return 4 * chunks * CHUNK + -(-chunks // CHUNK) * CHUNK + _HISTOGRAM + CHUNK


@compiled
def scratch_at(address: int, vocab_size: int) -> Scratch:
    chunks = -(-vocab_size // CHUNK)
    step = chunks * CHUNK * 4
    rest = address + 4 * step
    return Scratch(
        floats(address, vocab_size),
        floats(address + step, chunks * CHUNK),
        int32s(rest + (_HISTOGRAM + CHUNK) * 4, chunks),
        int32s(address + 2 * step, chunks * CHUNK),
        int32s(address + 3 * step, vocab_size),
        int32s(rest, _HISTOGRAM),
        int32s(rest + _HISTOGRAM * 4, CHUNK),
    )
