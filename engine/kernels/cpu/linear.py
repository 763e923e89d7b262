"""Linear layers: own packed panels where the CPU has the instructions, torch for the rest."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from engine.kernels.cpu.emit import LANES
from engine.kernels.cpu.kernel import Kernel, threads_for
from engine.kernels.cpu.packing import IN_TILES, PANELS, Packing, WeightMemory
from engine.kernels.cpu.product import FEW_ROWS, WIDEN_WORDS, WIDENED, product, widen_rows
from engine.kernels.cpu.product import WORDS as PRODUCT_WORDS
from engine.kernels.cpu.recording import empty, empty_rows
from engine.kernels.cpu.short import SHORT
from engine.kernels.cpu.short import WORDS as SHORT_WORDS
from engine.kernels.cpu.shortening import Shortening
from engine.kernels.cpu.tile_product import tile_product, tiles_together
from engine.kernels.interface import Linear

# One packing serves every number of rows: packings for 1 to 512 rows ran within noise of it.
ONEDNN_PACK_ROWS = 64

SHORTENED = ("bf16", "bf16_dot", "bf16_narrow")  # element types
TOGETHER = 8  # panels in one claim, at most
# Rows whose products with a weight take as long as an element of the other kernels does; for fewer
# the weight is read in that time.
ROWS_PER_ELEMENT = 8


class ShortProduct(NamedTuple):
    """That with weights of twelve bits."""

    multiply: Kernel
    shortening: Shortening


class Product(NamedTuple):
    """Our own matrix product for one type."""

    multiply: Kernel
    packing: Packing
    widen_rows: Kernel | None = None  # for more than FEW_ROWS
    # Panels in one claim at most, by the number of rows and the bytes of a panel.
    together: Callable[[int, int], int] = lambda rows, panel_bytes: TOGETHER
    short: ShortProduct | None = None

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        widen = () if self.widen_rows is None else (self.widen_rows,)
        if self.short is None:
            return self.multiply, *widen
        return self.short.multiply, self.multiply, *self.short.shortening.kernels, *widen


def tile_product_of() -> Product:
    """With AMX."""
    multiply = Kernel(tile_product, "bf16_tiles", PRODUCT_WORDS)
    return Product(multiply, IN_TILES, together=tiles_together)


def product_of(element: str) -> Product:
    widen = None
    if element.removesuffix("_narrow") in WIDENED:
        widen = Kernel(widen_rows, element, WIDEN_WORDS)
    short = None
    if element in SHORTENED:
        multiply = Kernel(product, element, PRODUCT_WORDS + SHORT_WORDS, SHORT)
        short = ShortProduct(multiply, Shortening(element, PANELS[element]))
    return Product(Kernel(product, element, PRODUCT_WORDS), PANELS[element], widen, short=short)


def make_linear(
    product: Product | None,  # None: leave it to torch
    place: WeightMemory,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Linear:
    if product is not None:
        return PanelLinear(product, packed(product, place, weight), weight, bias)
    return OnednnLinear(weight, bias) if reorders(weight.dtype) else PlainLinear(weight, bias)


class Packed(NamedTuple):
    """A weight in panels, and what reads it; the plain copy is not kept."""

    multiply: Kernel
    panels: torch.Tensor
    rows: Callable[[torch.Tensor], torch.Tensor]  # those of such numbers, zeros behind the inputs
    more: tuple[int, ...] = ()  # words for `multiply`


def packed(product: Product, place: WeightMemory, weight: torch.Tensor) -> Packed:
    if product.short is not None:
        shortening = product.short.shortening
        short = shortening.pack(weight, place)
        if short is not None:
            rows = partial(shortening.rows, short)
            return Packed(product.short.multiply, short.panels, rows, short.words)
    panels = product.packing.pack(weight, place.empty)
    return Packed(product.multiply, panels, partial(product.packing.rows, panels))


def reorders(dtype: torch.dtype) -> bool:
    """Whether torch has a layout of its own for weights of this type."""
    onednn = dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    return onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PanelLinear:
    def __init__(
        self,
        product: Product,
        packed: Packed,
        weight: torch.Tensor,  # the plain one, for its shape and type
        bias: torch.Tensor | None,
    ) -> None:
        self._product, self._packed = product, packed
        self._columns, self._inputs = weight.shape
        self._dtype = weight.dtype
        packing = product.packing
        self._num_panels, self._steps, words = packing.shape(weight.shape)
        self._num_words = self._num_panels * self._steps * words
        self._padding = -self._inputs % packing.inputs
        missing = -self._columns % packing.columns
        self._bias = None if bias is None else F.pad(bias.float(), (0, missing))
        self._bias_address = 0 if self._bias is None else self._bias.data_ptr()
        self._panel_bytes = packed.panels[:1].nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, inputs = x.shape
        assert inputs == self._inputs
        assert x.dtype is self._dtype
        assert x.stride(1) == 1
        if self._padding:
            x = F.pad(x, (0, self._padding))
        out = empty((rows, self._columns), x.dtype)
        if self._product.widen_rows is not None and rows > FEW_ROWS:
            x = self._widened(self._product.widen_rows, x)
        threads = threads_for(self._num_words * max(rows, ROWS_PER_ELEMENT) // ROWS_PER_ELEMENT)
        self._packed.multiply(
            threads,
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            self._packed.panels.data_ptr(),
            self._steps,
            self._bias_address,
            out.data_ptr(),
            self._columns,
            rows,
            min(
                max(1, self._num_panels // (2 * threads)),
                self._product.together(rows, self._panel_bytes),
            ),
            *self._packed.more,
        )
        return out

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of the plain weight. A line of memory for every word: 0.2 ms for 32 rows of 768."""
        return self._packed.rows(token_ids)[:, : self._inputs].contiguous()

    def _widened(self, widen: Kernel, x: torch.Tensor) -> torch.Tensor:
        rows, inputs = x.shape
        wide = empty_rows(rows, -(-inputs // LANES) * LANES, torch.float32)
        widen(
            threads_for(x.numel()),
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            self._steps,
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
