"""The generator against the known answers of its authors (Random123, kat_vectors)."""

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from engine.sampler import arithmetic
from engine.sampler.cpu import philox as compiled
from tests.engine.sampler import oracle

ONES = 0xFFFFFFFF
KNOWN = pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)


def call_philox(words: Any) -> Any:
    return compiled.philox(words[0], words[1], words[2], words[3], words[4], words[5])


def call_fill(first: Any, seed: Any, position: Any, choice: Any, bits: Any) -> None:
    compiled.fill(first, seed, position, choice, bits)


compiled_philox, compiled_fill = njit(call_philox), njit(call_fill)


@KNOWN
def test_oracle(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert oracle.philox(counter, key) == answer


@KNOWN
def test_torch(counter: list[int], key: list[int], answer: list[int]) -> None:
    seed = torch.tensor(key[0] | key[1] << 32, dtype=torch.uint64).view(torch.int64)
    words = arithmetic.philox(tuple(torch.tensor(c) for c in counter), seed)
    assert [int(word) for word in words] == answer


@KNOWN
def test_compiled(counter: list[int], key: list[int], answer: list[int]) -> None:
    words = compiled_philox(np.array(counter + key, np.uint64))
    assert [int(word) for word in words] == answer


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
def test_bits_of_tokens(seed: int) -> None:
    bits = np.zeros(128, np.int32)
    compiled_fill(256, seed, 77, 3, bits)
    key = [seed & ONES, seed >> 32 & ONES]
    for i in (0, 1, 2, 3, 4, 90, 127):
        token = 256 + i
        words = oracle.philox([token // 4, 77, 3, 0x6B767264], key)
        assert bits[i] == words[token % 4] >> 1
