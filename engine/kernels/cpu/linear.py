"""Linear layers: own packed panels where the CPU has the instructions, torch for the rest."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from engine.kernels.cpu.emit import LANES
from engine.kernels.cpu.kernel import Kernel, threads_for
from engine.kernels.cpu.packing import IN_TILES, PANELS, Packing, WeightMemory
from engine.kernels.cpu.product import FEW_ROWS, WIDEN_WORDS, WIDENED, product, widen_rows
from engine.kernels.cpu.product import WORDS as PRODUCT_WORDS
from engine.kernels.cpu.recording import empty, empty_rows
from engine.kernels.cpu.tile_product import tile_product, tiles_together
from engine.kernels.interface import Linear

# One packing serves every number of rows: packings for 1 to 512 rows ran within noise of it.
ONEDNN_PACK_ROWS = 64

TOGETHER = 8  # panels in one claim, at most
# Rows whose products with a weight take as long as an element of the other kernels does; for fewer
# the weight is read in that time.
ROWS_PER_ELEMENT = 8


class Product(NamedTuple):
    """Our own matrix product for one type."""

    multiply: Kernel
    packing: Packing
    widen_rows: Kernel | None = None  # for more than FEW_ROWS
    # Panels in one claim at most, by the number of rows and the bytes of a panel.
    together: Callable[[int, int], int] = lambda rows, panel_bytes: TOGETHER

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (self.multiply,) if self.widen_rows is None else (self.multiply, self.widen_rows)


def tile_product_of() -> Product:
    """With AMX."""
    multiply = Kernel(tile_product, "bf16_tiles", PRODUCT_WORDS)
    return Product(multiply, IN_TILES, together=tiles_together)


def product_of(element: str) -> Product:
    widen = None
    if element.removesuffix("_narrow") in WIDENED:
        widen = Kernel(widen_rows, element, WIDEN_WORDS)
    return Product(Kernel(product, element, PRODUCT_WORDS), PANELS[element], widen)


def make_linear(
    product: Product | None,  # None: leave it to torch
    place: WeightMemory,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Linear:
    if product is not None:
        packed = product.packing.pack(weight, place)
        return PanelLinear(product, packed, weight.shape, bias)
    return OnednnLinear(weight, bias) if reorders(weight.dtype) else PlainLinear(weight, bias)


def reorders(dtype: torch.dtype) -> bool:
    """Whether torch has a layout of its own for weights of this type."""
    onednn = dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    return onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PanelLinear:
    """A weight packed in panels for `product`; the plain copy is not kept."""

    def __init__(
        self,
        product: Product,
        panels: torch.Tensor,
        shape: tuple[int, ...],  # of the plain weight
        bias: torch.Tensor | None,
    ) -> None:
        self._product = product
        self._columns, self._inputs = shape
        self._panels = panels
        self._padding = -self._inputs % product.packing.inputs
        missing = -self._columns % product.packing.columns
        self._bias = None if bias is None else F.pad(bias.float(), (0, missing))
        self._bias_address = 0 if self._bias is None else self._bias.data_ptr()
        self._panel_bytes = panels[:1].nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, inputs = x.shape
        assert inputs == self._inputs
        assert x.dtype is self._panels.dtype
        assert x.stride(1) == 1
        if self._padding:
            x = F.pad(x, (0, self._padding))
        out = empty((rows, self._columns), x.dtype)
        if self._product.widen_rows is not None and rows > FEW_ROWS:
            x = self._widened(self._product.widen_rows, x)
        threads = threads_for(
            self._panels.numel() * max(rows, ROWS_PER_ELEMENT) // ROWS_PER_ELEMENT
        )
        self._product.multiply(
            threads,
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            self._panels.data_ptr(),
            self._panels.shape[1],
            self._bias_address,
            out.data_ptr(),
            self._columns,
            rows,
            min(
                max(1, self._panels.shape[0] // (2 * threads)),
                self._product.together(rows, self._panel_bytes),
            ),
        )
        return out

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of the plain weight. A line of memory for every word: 0.2 ms for 32 rows of 768."""
        return self._product.packing.rows(self._panels, token_ids)[:, : self._inputs].contiguous()

    def _widened(self, widen: Kernel, x: torch.Tensor) -> torch.Tensor:
        rows, inputs = x.shape
        wide = empty_rows(rows, -(-inputs // LANES) * LANES, torch.float32)
        widen(
            threads_for(x.numel()),
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            self._panels.shape[1],
            rows,
            wide.data_ptr(),
            wide.stride(0) * wide.itemsize,
        )
        return wide


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
