"""The functions of the definition against fp64, and compiled == torch to the last bit."""

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from engine.sampler import arithmetic
from engine.sampler.cpu import arithmetic as compiled


def call_exp(values: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = compiled.exp(values[i])


def call_weight(values: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = compiled.weight(values[i])


def call_exponential(values: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = compiled.exponential(values[i])


def test_exp() -> None:
    a = torch.cat((torch.linspace(-87, 87, 200_001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])))
    got = arithmetic.exp(a)
    torch.testing.assert_close(got.double(), a.double().exp(), rtol=2e-7, atol=0)
    assert arithmetic.exp(torch.zeros(1)).item() == 1.0
    out = np.empty(a.numel(), np.float32)
    njit(call_exp)(a.numpy(), out)
    assert np.array_equal(out, got.numpy())


def test_weight() -> None:
    y = torch.cat((torch.linspace(0, 100, 100_001), torch.tensor([torch.inf, 3e38])))
    got = arithmetic.weight(y)
    assert got[0] == 2**40
    assert got[-2:].tolist() == [0, 0]
    exact = (-y.double()).exp() * 2**40
    assert ((got - exact).abs() <= 1 + 2e-7 * exact).all()
    out = np.empty(y.numel(), np.int64)
    njit(call_weight)(y.numpy(), out)
    assert np.array_equal(out, got.numpy())


@pytest.mark.parametrize("seed", [0, 1])
def test_exponential(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = [*range(100), *(2**k for k in range(31)), *range(2**31 - 100, 2**31)]
    edges += range(2**30 - 50, 2**30 + 50)  # where t passes 1/2
    bits = np.concatenate((rng.integers(0, 2**31, 100_000), edges)).astype(np.int32)
    got = arithmetic.exponential(torch.from_numpy(bits).long() << 1)
    t = np.minimum((bits + 0.5) * 2.0**-31, 1 - 2.0**-24)
    # t itself is rounded to fp32, which matters where 1 - t is small
    slack = 2e-7 + 2.0**-24 * t / (1 - t) / -np.log1p(-t)
    relative = np.abs(got.double().numpy() / -np.log1p(-t) - 1)
    assert (relative <= slack).all()
    assert (got.numpy() >= t.astype(np.float32)).all()  # the bound that skips tokens
    out = np.empty(bits.size, np.float32)
    njit(call_exponential)(bits, out)
    assert np.array_equal(out, got.numpy())
