"""The functions of the definition on torch tensors, bit for bit as the compiled twins'."""

import torch

from engine.sampler import definition as d

_LOW = 0xFFFFFFFF
INFINITY_BITS = 0x7F800000


def exp(a: torch.Tensor) -> torch.Tensor:
    """For |a| <= 87."""
    n = (a * d.LOG2_E + d.ROUND) - d.ROUND
    r = (a - n * d.LN2_HIGH) - n * d.LN2_LOW
    p = _horner(d.EXP, r)
    return p * ((n.int() + 127) << 23).view(torch.float32)


def weight(y: torch.Tensor) -> torch.Tensor:
    """floor(2^40 * exp(-y)) for y >= 0, infinity included."""
    return (exp(-y.clamp(max=d.MAX_DISTANCE)) * d.WEIGHT_ONE).long()


def exponential(words: torch.Tensor) -> torch.Tensor:
    """-log(1 - t) of 32 random bits, given as int64."""
    t = (((words >> 1).float() + 0.5) * 2.0**-31).clamp(max=d.T_MAX)
    s = 1.0 - t
    k = (126 - (s.view(torch.int32) >> 23)).clamp(min=0)
    scaled = 1.0 - s * ((k + 127) << 23).view(torch.float32)
    f = torch.where(k == 0, t, scaled)
    return k.float() * d.LN2 + f * _horner(d.LOG, f)


def philox(counter: tuple[torch.Tensor, ...], seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10: 32-bit words in int64, whose products wrap around unharmed."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(d.PHILOX_ROUNDS):
        p0, p1 = c0 * d.PHILOX_MULTIPLIERS[0], c2 * d.PHILOX_MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + d.PHILOX_WEYL[0]) & _LOW, (k1 + d.PHILOX_WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _horner(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    p = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = p * x + c
    return p
