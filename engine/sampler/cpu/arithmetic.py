"""The fp32 functions of the definition, and floats seen as integers that sort alike."""

from typing import Any

import numpy as np

from engine.sampler import definition as d
from engine.sampler.cpu.jit import inlined

F = np.float32

_LOG2_E, _ROUND = F(d.LOG2_E), F(d.ROUND)
_LN2, _LN2_HIGH, _LN2_LOW = F(d.LN2), F(d.LN2_HIGH), F(d.LN2_LOW)
_X0, _X1, _X2, _X3, _X4, _X5, _X6 = (F(c) for c in d.EXP)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (F(c) for c in d.LOG)
_T_STEP, _T_MAX = F(2.0**-31), F(d.T_MAX)
_WEIGHT_ONE = F(d.WEIGHT_ONE)
_MAX_DISTANCE = F(d.MAX_DISTANCE)

INFINITY_BITS = 0x7F800000


@inlined
def float_bits(x: Any) -> Any:
    return F(x).view(np.int32)


@inlined
def widen(bits: Any, shift: Any) -> Any:
    """A float from its upper bits: shift 16 for bf16, 0 for fp32."""
    return np.int32(np.int64(bits) << shift).view(np.float32)


@inlined
def exp(a: Any) -> Any:
    """For |a| <= 87."""
    n = (a * _LOG2_E + _ROUND) - _ROUND
    r = (a - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_X0 * r + _X1) * r + _X2) * r + _X3) * r + _X4) * r
    p = (p + _X5) * r + _X6
    return p * np.int32((np.int32(n) + 127) << 23).view(np.float32)


@inlined
def weight(y: Any) -> Any:
    """floor(2^40 * exp(-y)) for y >= 0, infinity included."""
    return np.int64(exp(-min(y, _MAX_DISTANCE)) * _WEIGHT_ONE)


@inlined
def exponential(b: Any) -> Any:
    """-log(1 - t) of 31 random bits."""
    t: Any = min((F(b) + F(0.5)) * _T_STEP, _T_MAX)
    s = F(1.0) - t
    k: Any = max(126 - (np.int64(float_bits(s)) >> 23), 0)
    f = t if k == 0 else F(1.0) - s * np.int32((k + 127) << 23).view(np.float32)
    p = (((_L0 * f + _L1) * f + _L2) * f + _L3) * f
    p = ((((p + _L4) * f + _L5) * f + _L6) * f + _L7) * f + _L8
    return F(k) * _LN2 + f * p
