"""Random weights that are the same, bit for bit, on every device.

A device's own generator gives numbers of its own, on some devices by how many cores they have; but
workers whose fingerprints are equal use each other's keys and values.
"""

from __future__ import annotations

import hashlib
import math

import torch

# Elements made at once: temporaries stay small on a GPU and in the caches of a CPU.
CHUNK = 1 << 19
# splitmix64's, as signed numbers of 64 bits, which wrap around alike everywhere
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_LAST_SHIFT = 31


class RandomTensors:
    """Weights as at the start of training: each element a function of seed, name and place."""

    def __init__(self, seed: int, std: float, norm_value: float = 1.0) -> None:
        self.seed = seed
        self.std = std
        self.norm_value = norm_value

    def read(self, name: str, out: torch.Tensor) -> None:
        if "norm" in name and name.endswith("weight"):
            out.fill_(self.norm_value)
        elif name.endswith("bias"):
            out.zero_()
        else:
            digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
            _fill(out.view(-1), int.from_bytes(digest, "little"), self.std)


def _fill(out: torch.Tensor, key: int, std: float) -> None:
    """Uniform around 0: a product of two floats rounds alike everywhere, a logarithm does not."""
    scale = std * math.sqrt(3) / 2**31
    steps = torch.arange(1, CHUNK // 2 + 1, device=out.device).mul_(_STEP)
    for start in range(0, out.numel(), CHUNK):
        chunk = out[start : start + CHUNK]
        words = split_mix(steps + _signed(key + start // 2 * _STEP)).view(torch.int32)
        torch.mul(words[: chunk.numel()].float(), scale, out=chunk)


def split_mix(states: torch.Tensor) -> torch.Tensor:
    """splitmix64's numbers for these states, int64, which they replace."""
    for shift, factor in _ROUNDS:
        _xor_shifted(states, shift).mul_(factor)
    return _xor_shifted(states, _LAST_SHIFT)


def _xor_shifted(states: torch.Tensor, shift: int) -> torch.Tensor:
    # int64 shifts its sign in; those bits are cleared
    return states.bitwise_xor_((states >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _signed(word: int) -> int:
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
