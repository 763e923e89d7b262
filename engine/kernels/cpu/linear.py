"""Linear layers: own packed panels where the CPU has the instructions, torch for the rest."""

import math

import torch
from torch.nn import functional as F

from engine.kernels.cpu.features import CpuFeatures
from engine.kernels.cpu.kernel import Kernel, threads_for
from engine.kernels.cpu.product import INPUTS_PER_STEP
from engine.kernels.cpu.recording import empty
from engine.kernels.cpu.tile import COLUMNS, LINE_BYTES
from engine.kernels.interface import Linear
from kv_cache.huge_pages import prefer_huge_pages

# One packing serves every number of rows: packings for 1 to 512 rows ran within noise of it.
ONEDNN_PACK_ROWS = 64

PRODUCTS_PER_ELEMENT = 8  # that take as long as an element of the other kernels
CHUNK_BYTES = 64 << 20  # of packed weights; beyond 32 MiB malloc asks the system for new memory
MOST_TOGETHER = 8  # panels in one claim: within one, the next panel is fetched early


class WeightMemory:
    """Memory for packed weights in huge pages, which a weight alone may be too small for: a
    stream of weights is slower where the way to each 4 kB must be looked up."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._rest.numel():
            self._rest = torch.empty(max(num_bytes, CHUNK_BYTES), dtype=torch.uint8)
            prefer_huge_pages(self._rest.data_ptr(), self._rest.numel())
        place = self._rest[:num_bytes]
        self._rest = self._rest[-(-num_bytes // LINE_BYTES) * LINE_BYTES :]
        return place.view(dtype).view(shape)


def make_linear(
    features: CpuFeatures,
    product: Kernel,
    place: WeightMemory,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Linear:
    if features.multiplies_panels(weight.dtype):
        return PanelLinear(product, panels(weight, place), weight.shape, bias)
    onednn = torch.backends.mkldnn.is_available()
    if weight.dtype == torch.bfloat16 and onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return OnednnLinear(weight, bias)
    return PlainLinear(weight, bias)


class PanelLinear:
    """A weight packed in panels for `product`; the plain copy is not kept."""

    def __init__(
        self,
        product: Kernel,
        panels: torch.Tensor,
        shape: tuple[int, ...],  # of the plain weight
        bias: torch.Tensor | None,
    ) -> None:
        self._product = product
        self._columns, self._inputs = shape
        self._panels = panels
        self._bias = None if bias is None else F.pad(bias.float(), (0, -self._columns % COLUMNS))
        self._bias_address = 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, inputs = x.shape
        assert inputs == self._inputs
        assert x.dtype is self._panels.dtype
        x = x.contiguous()
        if inputs % INPUTS_PER_STEP[x.dtype]:
            x = F.pad(x, (0, 1))
        out = empty((rows, self._columns), x.dtype)
        threads = threads_for(rows * self._panels.numel() // PRODUCTS_PER_ELEMENT)
        self._product(
            threads,
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            self._panels.data_ptr(),
            self._panels.shape[1],
            self._bias_address,
            out.data_ptr(),
            self._columns,
            rows,
            min(max(1, self._panels.shape[0] // (2 * threads)), MOST_TOGETHER),
        )
        return out


class OnednnLinear:
    """A bf16 weight in oneDNN's blocked layout; the plain copy is not kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        pack = torch.ops.mkldnn._reorder_linear_weight
        self._packed = pack(weight.contiguous(), ONEDNN_PACK_ROWS)
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


def panels(weight: torch.Tensor, place: WeightMemory) -> torch.Tensor:
    """[out, in] to [panels, steps, 64, inputs per step], with zeros behind the last ones."""
    columns, inputs = weight.shape
    per_step = INPUTS_PER_STEP[weight.dtype]
    num_panels, steps = -(-columns // COLUMNS), -(-inputs // per_step)
    packed = place.empty((num_panels, steps, COLUMNS, per_step), weight.dtype)
    if inputs % per_step:
        weight = F.pad(weight, (0, 1))
    full = columns // COLUMNS
    view = weight[: full * COLUMNS].reshape(full, COLUMNS, steps, per_step)
    packed[:full].copy_(view.transpose(1, 2))
    if full < num_panels:
        packed[full].zero_()
        rest = weight[full * COLUMNS :].reshape(-1, steps, per_step)
        packed[full, :, : rest.shape[0]].copy_(rest.transpose(0, 1))
    return packed
