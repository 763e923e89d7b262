"""act(gate) * up in one pass over both."""

import torch
import triton
import triton.language as tl

from engine.kernels.interface import Activation
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.softmax import tanh
from engine.kernels.triton.tiles import power_of_two

MAX_BLOCK = 1024


@triton.jit
def gated_kernel(
    gate_up_ptr: tl.tensor,  # [tokens, 2 * WIDTH]
    out_ptr: tl.tensor,  # [tokens, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    row = gate_up_ptr + token * 2 * WIDTH
    gate = tl.load(row + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        act = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        act = 0.5 * gate * (1.0 + tanh(inner))
    out = (act * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * WIDTH + cols, out, mask=inside)


def gated_launch(gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> Launch:
    tokens, width = out.shape
    block = min(power_of_two(width), MAX_BLOCK)
    return Launch(
        gated_kernel,
        (tokens, -(-width // block)),
        (gate_up, out),
        {"WIDTH": width, "BLOCK": block, "ACTIVATION": activation.value},
        num_warps=4,
    )
