"""Philox4x32-10, several counters at once."""

from typing import Any

import numpy as np

from engine.sampler import definition as d
from engine.sampler.cpu.jit import inlined
from engine.sampler.cpu.memory import Array

U = np.uint64
_M0, _M1 = (U(m) for m in d.PHILOX_MULTIPLIERS)
_W0, _W1 = (U(w) for w in d.PHILOX_WEYL)
_DOMAIN, _LOW, _HALF = U(d.DOMAIN), U(0xFFFFFFFF), U(32)
_ROUNDS = d.PHILOX_ROUNDS


@inlined
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """32-bit words kept in 64 bits, where one instruction multiplies eight of them."""
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@inlined
def fill(first: Any, seed: Any, position: Any, choice: Any, bits: Array) -> None:
    """bits [n]: the upper 31 random bits of tokens first .. first + n, both multiples of 4.

    Results lie side by side, one slice: LLVM does not vectorise stores to four.
    """
    k0, k1 = U(seed) & _LOW, U(seed) >> _HALF
    c1, c2 = U(position) & _LOW, U(choice) & _LOW
    for i in range(bits.size // 4):
        a, b, c, e = philox(U(first // 4 + i), c1, c2, _DOMAIN, k0, k1)
        bits[4 * i], bits[4 * i + 1] = np.int32(a >> U(1)), np.int32(b >> U(1))
        bits[4 * i + 2], bits[4 * i + 3] = np.int32(c >> U(1)), np.int32(e >> U(1))
