"""Linear layers: own packed panels where the CPU has the instructions, torch for the rest."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from engine.kernels.cpu.emit import LANES
from engine.kernels.cpu.kernel import Kernel, threads_for
from engine.kernels.cpu.packing import IN_TILES, PANELS, Packing, WeightMemory
from engine.kernels.cpu.product import FEW_ROWS, WIDENED, product, widen_rows
from engine.kernels.cpu.product import WORDS as PRODUCT_WORDS
from engine.kernels.cpu.recording import empty
from engine.kernels.cpu.tile_product import MOST_TOGETHER, lay_rows, tile_product
from engine.kernels.cpu.tile_product import ROWS as TOGETHER_ROWS
from engine.kernels.interface import Linear

# One packing serves every number of rows: packings for 1 to 512 rows ran within noise of it.
ONEDNN_PACK_ROWS = 64

LAY_WORDS = "6q"  # the last, from row to row of what is laid, is for rows alone, not for tiles
TOGETHER_BYTES = 1 << 20  # of panels, which stay in the second cache level
# Rows whose products with a weight take as long as an element of the other kernels does; for fewer
# the weight is read in that time.
ROWS_PER_ELEMENT = 8


class Laying(NamedTuple):
    """How many rows lie for a product."""

    lay_rows: Kernel
    few: int  # rows that stay as they are
    empty: Callable[[torch.Tensor], torch.Tensor]  # their place


class Product(NamedTuple):
    """Our own matrix product for one type."""

    multiply: Kernel
    packing: Packing
    laying: Laying | None = None
    claim_bytes: int | None = None  # of panels that a thread takes at once, at most

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (self.multiply,) if self.laying is None else (self.multiply, self.laying.lay_rows)


def tile_product_of(element: str) -> Product:
    """With AMX."""
    multiply = Kernel(tile_product, "bf16_tiles", PRODUCT_WORDS)
    laying = Laying(Kernel(lay_rows, element, LAY_WORDS), TOGETHER_ROWS, _rows_in_tiles)
    return Product(multiply, IN_TILES, laying, TOGETHER_BYTES)


def product_of(element: str) -> Product:
    laying = None
    if element.removesuffix("_narrow") in WIDENED:
        laying = Laying(Kernel(widen_rows, element, LAY_WORDS), FEW_ROWS, _wide_rows)
    return Product(Kernel(product, element, PRODUCT_WORDS), PANELS[element], laying)


def _rows_in_tiles(x: torch.Tensor) -> torch.Tensor:
    rows, inputs = x.shape
    return empty((-(-rows // TOGETHER_ROWS) * TOGETHER_ROWS, inputs), x.dtype)


def _wide_rows(x: torch.Tensor) -> torch.Tensor:
    """A line from row to row that nobody needs, or rows of some lengths would all lie in the same
    few places of the first cache level."""
    rows, inputs = x.shape
    return empty((rows, -(-inputs // LANES) * LANES + LANES), torch.float32)


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
        self._most_together = MOST_TOGETHER
        if product.claim_bytes is not None:
            fitting = product.claim_bytes // panels[:1].nbytes
            self._most_together = min(MOST_TOGETHER, max(1, fitting))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, inputs = x.shape
        assert inputs == self._inputs
        assert x.dtype is self._panels.dtype
        x = x.contiguous()
        if self._padding:
            x = F.pad(x, (0, self._padding))
        out = empty((rows, self._columns), x.dtype)
        laying = self._product.laying
        if laying is not None and rows > laying.few:
            x = self._laid(laying, x)
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
            min(max(1, self._panels.shape[0] // (2 * threads)), self._most_together),
        )
        return out

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of the plain weight. A line of memory for every word: 0.2 ms for 32 rows of 768."""
        return self._product.packing.rows(self._panels, token_ids)[:, : self._inputs].contiguous()

    def _laid(self, laying: Laying, x: torch.Tensor) -> torch.Tensor:
        laid = laying.empty(x)
        laying.lay_rows(
            threads_for(x.numel()),
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            self._panels.shape[1],
            x.shape[0],
            laid.data_ptr(),
            laid.stride(0) * laid.itemsize,
        )
        return laid


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
