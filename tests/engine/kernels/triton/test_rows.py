import pytest
import torch

from engine.kernels.interface import Activation
from engine.kernels.reference import ReferenceKernels
from engine.kernels.triton.kernels import TritonKernels

KERNELS, REFERENCE = TritonKernels(num_programs=4), ReferenceKernels()
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)


@DTYPES
@pytest.mark.parametrize("hidden", [16, 100, 768, 4096])
def test_norms(hidden: int, dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    x, residual = torch.randn(5, hidden).to(dtype), torch.randn(5, hidden).to(dtype)
    weight = torch.rand(hidden)
    out = KERNELS.rms_norm(x.to(device), weight.to(device), 1e-5)
    expected = REFERENCE.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)

    there = residual.to(device, copy=True)
    out = KERNELS.add_rms_norm(x.to(device), there, weight.to(device), 1e-5)
    expected = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(there.cpu(), residual, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("width", [24, 1500])
def test_gated_activation(
    width: int, activation: Activation, dtype: torch.dtype, tolerance: float, device: torch.device
) -> None:
    gate_up = (4 * torch.randn(3, 2 * width)).to(dtype)
    gate_up[0, :2] = torch.tensor([300.0, -300.0])
    out = KERNELS.gated_activation(gate_up.to(device), activation)
    expected = REFERENCE.gated_activation(gate_up, activation)
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_linear(device: torch.device) -> None:
    weight, bias, x = torch.randn(8, 32), torch.randn(8), torch.randn(3, 32)
    out = KERNELS.linear(weight.to(device), bias.to(device))(x.to(device))
    torch.testing.assert_close(out.cpu(), REFERENCE.linear(weight, bias)(x))


def test_no_tokens(device: torch.device) -> None:
    x = torch.empty(0, 64, device=device)
    assert KERNELS.rms_norm(x, torch.ones(64, device=device), 1e-5).shape == (0, 64)
    assert KERNELS.gated_activation(x, Activation.SILU).shape == (0, 32)
