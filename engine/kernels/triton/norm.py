"""RMSNorm, alone or after a residual sum: one program a row, one read and one write."""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import Launch
from engine.kernels.triton.tiles import power_of_two


@triton.jit
def norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,  # None: the norm of x alone
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    cols = tl.arange(0, BLOCK)
    inside = cols < HIDDEN
    x = tl.load(x_ptr + row + cols, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row + cols, mask=inside, other=0.0).to(tl.float32)
        stored = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row + cols, stored, mask=inside)
        x = stored.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + EPS) * weight
    tl.store(out_ptr + row + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def norm_launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> Launch:
    hidden = x.shape[-1]
    block = power_of_two(hidden)
    return Launch(
        norm_kernel,
        (x.numel() // hidden,),
        (x, residual, weight, out),
        {"HIDDEN": hidden, "BLOCK": block, "EPS": eps},
        num_warps=min(max(block // 512, 1), 16),
    )
