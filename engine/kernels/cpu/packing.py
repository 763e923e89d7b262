"""How weights lie in memory for the own matrix products: panels, each a stream of its steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from engine.kernels.cpu import tile_product
from engine.kernels.cpu.emit import LANES, LINE_BYTES
from engine.kernels.cpu.short import COLUMNS
from kv_cache.huge_pages import prefer_huge_pages

CHUNK_BYTES = 64 << 20  # of packed weights; beyond 32 MiB malloc asks the system for new memory


class WeightMemory:
    """Memory for packed weights in huge pages, which a weight alone may be too small for: a
    stream of weights is slower where the way to each 4 kB must be looked up."""

    def __init__(self) -> None:
        self._rest = self._before = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._rest.numel():
            self._rest = torch.empty(max(num_bytes, CHUNK_BYTES), dtype=torch.uint8)
            prefer_huge_pages(self._rest.data_ptr(), self._rest.numel())
        self._before = self._rest
        place = self._rest[:num_bytes]
        self._rest = self._rest[-(-num_bytes // LINE_BYTES) * LINE_BYTES :]
        return place.view(dtype).view(shape)

    def take_back(self) -> None:
        """What was given last, and nobody has."""
        self._rest = self._before


@dataclass(frozen=True)
class Packing:
    columns: int  # of a panel
    inputs: int  # of a step
    arranged: Callable[[torch.Tensor], torch.Tensor]  # [panels, columns, inputs] as it shall lie
    # packed panels, panels and columns in them -> [count, ...] words in the inputs' order
    gathered: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    def shape(self, weight: tuple[int, ...]) -> tuple[int, int, int]:
        """Panels, their steps, and words in each."""
        columns, inputs = weight
        return -(-columns // self.columns), -(-inputs // self.inputs), self.columns * self.inputs

    def pack(self, weight: torch.Tensor, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
        """[out, in] to [panels, steps, ...], with zeros behind the last ones, in `empty` memory."""
        columns, inputs = weight.shape
        packed = empty(self.shape(weight.shape), dtype=weight.dtype)
        weight = F.pad(weight, (0, -inputs % self.inputs)) if inputs % self.inputs else weight
        full, rest = divmod(columns, self.columns)
        self._lay(packed[:full], weight[: columns - rest])
        if rest:
            self._lay(packed[full:], F.pad(weight[-rest:], (0, 0, 0, self.columns - rest)))
        return packed

    def rows(self, packed: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """[count, in] of the weight, with the zeros behind the last input."""
        panel, column = numbers // self.columns, numbers % self.columns
        words = self.gathered(packed, panel, column)
        return words.flatten(1).view(packed.dtype)

    def _lay(self, packed: torch.Tensor, weight: torch.Tensor) -> None:
        """Whole panels, without another copy of them."""
        laid = self.arranged(weight.reshape(-1, self.columns, weight.shape[1]))
        packed.view(laid.shape).copy_(laid)


def by_columns(inputs: int) -> Packing:
    """[steps][64 columns][inputs], for `product.py`."""

    def arranged(panels: torch.Tensor) -> torch.Tensor:
        steps = panels.shape[2] // inputs
        return panels.view(-1, COLUMNS, steps, inputs).transpose(1, 2)

    def gathered(packed: torch.Tensor, panel: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        word = torch.int16 if inputs * packed.itemsize == 2 else torch.int32
        return packed.view(word)[panel, :, column]

    return Packing(COLUMNS, inputs, arranged, gathered)


def in_halves(lanes: int) -> Packing:
    """[steps][..][lanes][2 columns that are so many apart], for `product.py` to widen."""

    def arranged(panels: torch.Tensor) -> torch.Tensor:
        steps = panels.shape[2]
        return panels.view(-1, COLUMNS // (2 * lanes), 2, lanes, steps).permute(0, 4, 1, 3, 2)

    def gathered(packed: torch.Tensor, panel: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        halves = packed.view(torch.int16).view(*packed.shape[:2], -1, lanes, 2)
        pair, upper, lane = column // (2 * lanes), column // lanes % 2, column % lanes
        return halves[panel, :, pair, lane, upper]

    return Packing(COLUMNS, 1, arranged, gathered)


def in_tiles() -> Packing:
    """[steps][2 tiles][16 pairs of inputs][16 columns][2], for `tile_product.py`."""
    half, pairs = tile_product.COLUMNS // 2, tile_product.INPUTS // 2

    def arranged(panels: torch.Tensor) -> torch.Tensor:
        steps = panels.shape[2] // tile_product.INPUTS
        whole = panels.view(-1, 2, half, steps, pairs, 2)
        return whole.permute(0, 3, 1, 4, 2, 5)

    def gathered(packed: torch.Tensor, panel: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        tiles = packed.view(torch.int32).view(*packed.shape[:2], 2, pairs, half)
        return tiles[panel, :, column // half, :, column % half]

    return Packing(tile_product.COLUMNS, tile_product.INPUTS, arranged, gathered)


# By the element type that the kernel is compiled for.
PANELS = {
    "f32": by_columns(1),
    "f16": by_columns(1),
    "bf16": in_halves(LANES),
    "bf16_dot": by_columns(2),
    "f32_narrow": by_columns(1),
    "f16_narrow": by_columns(1),
    "bf16_narrow": in_halves(LANES // 2),
}
IN_TILES = in_tiles()
