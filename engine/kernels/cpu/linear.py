"""Linear layers: oneDNN with weights packed once for bf16, torch for the other dtypes."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

CpuLinear = Callable[[torch.Tensor], torch.Tensor]

# One packing serves every number of rows: packings for 1 to 512 rows ran within noise of it.
PACK_ROWS = 64


class PackedLinear:
    """A bf16 weight in oneDNN's blocked layout; the plain copy is not kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._run(x, self._packed, self._bias, "none", [], "")
        return y


class PlainLinear:
    """Any dtype torch knows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> CpuLinear:
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
