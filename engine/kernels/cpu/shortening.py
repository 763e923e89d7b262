"""Packs bf16 weights in twelve bits each, and reads them as they were."""

from typing import NamedTuple

import torch

from engine.kernels.cpu.kernel import Kernel, threads_for
from engine.kernels.cpu.packing import Packing, WeightMemory
from engine.kernels.cpu.recording import empty
from engine.kernels.cpu.short import (
    CODES,
    NO_CODE,
    ROWS_WORDS,
    SHORT,
    SHORTEN_WORDS,
    short_bytes,
    short_rows,
    shorten,
    word_of,
)

SAMPLE = 1 << 20  # weights by which the table of most steps is chosen
MOST_TABLES = 256  # what a byte can tell apart
CHUNK_PANELS = 64  # that are packed as they were first


class ShortPanels(NamedTuple):
    panels: torch.Tensor  # [panels, steps, bytes]
    ids: torch.Tensor  # [panels, steps] of tables
    tables: torch.Tensor  # [tables, 16] upper bytes

    @property
    def words(self) -> tuple[int, int]:
        """For the kernels, as WORDS."""
        return self.tables.data_ptr(), self.ids.data_ptr()


class Shortening:
    """The kernels around short panels of one packing, but for the product."""

    def __init__(self, element: str, packing: Packing) -> None:
        self._packing = packing
        self._shorten = Kernel(shorten, element, SHORTEN_WORDS, SHORT)
        self._rows = Kernel(short_rows, element, ROWS_WORDS, SHORT)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self._shorten, self._rows

    def pack(self, weight: torch.Tensor, place: WeightMemory) -> ShortPanels | None:
        """[out, in]; None where twelve bits are not enough."""
        columns = self._packing.columns
        panels, steps, words = self._packing.shape(weight.shape)
        tables = _Tables(weight)
        packed = place.empty((panels, steps, short_bytes(words)), torch.uint8)
        ids = torch.zeros(panels, steps, dtype=torch.uint8)
        for first in range(0, panels, CHUNK_PANELS):
            chunk = slice(first, first + CHUNK_PANELS)
            plain = self._packing.pack(
                weight[first * columns : (first + CHUNK_PANELS) * columns], torch.empty
            )
            others = torch.empty(plain.shape[:2], dtype=torch.bool)
            self._shorten(
                threads_for(plain.numel()),
                plain.data_ptr(),
                packed[chunk].data_ptr(),
                tables.first_codes.data_ptr(),
                others.numel(),
                others.data_ptr(),
            )
            if others.any():
                found = tables.codes(_upper(plain[others])[:, _order(words)])
                if found is None:
                    return None
                ids[chunk][others], (lower, upper) = found.ids, found.codes.chunk(2, 1)
                packed[chunk, :, words:][others] = lower | upper << 4
        return ShortPanels(packed, ids, tables.all())

    def rows(self, short: ShortPanels, numbers: torch.Tensor) -> torch.Tensor:
        """[count, in] of the weight, with the zeros behind the last input."""
        _, steps, _ = short.panels.shape
        out = empty((len(numbers), steps * self._packing.inputs), torch.bfloat16)
        numbers = numbers.contiguous()
        self._rows(
            threads_for(out.numel()),
            short.panels.data_ptr(),
            steps,
            numbers.data_ptr(),
            len(numbers),
            out.data_ptr(),
            *short.words,
        )
        return out


class _Found(NamedTuple):
    ids: torch.Tensor  # [steps]
    codes: torch.Tensor  # [steps, words]


class _Tables:
    """Of sixteen upper bytes each: the most frequent ones, and others as steps need them."""

    def __init__(self, weight: torch.Tensor) -> None:
        every = -(-weight.numel() // SAMPLE) | 1  # odd, so that it comes through all columns
        sample = _upper(weight.contiguous().view(-1)[::every])
        counts = torch.bincount(sample.int(), minlength=256)
        self._by_count: list[int] = counts.argsort(descending=True).tolist()
        self._tables: list[list[int]] = []
        self._sets: list[int] = []  # their bytes, as bits of a number
        self._add(0)
        self.first_codes = self._codes_of(self._tables[0])

    def all(self) -> torch.Tensor:
        return torch.tensor(self._tables, dtype=torch.uint8)

    def codes(self, upper: torch.Tensor) -> _Found | None:
        """Of steps, [steps, words] upper bytes; None if one has too many, or all together."""
        present = torch.zeros(len(upper), 256, dtype=torch.bool)
        present.scatter_(1, upper.long(), True)
        if present.sum(1).max() > CODES:
            return None
        needed, which = present.unique(dim=0, return_inverse=True)
        places = [
            self._place(sum(1 << byte for byte in row.nonzero()[:, 0].tolist())) for row in needed
        ]
        if len(self._tables) > MOST_TABLES:
            return None
        ids = torch.tensor(places, dtype=torch.uint8)[which]
        codes = torch.stack([self._codes_of(table) for table in self._tables])
        return _Found(ids, codes[ids.long().unsqueeze(1), upper.long()])

    def _place(self, needed: int) -> int:
        """Of the first table with these bytes."""
        for number, bytes_of_it in enumerate(self._sets):
            if not needed & ~bytes_of_it:
                return number
        return self._add(needed)

    def _add(self, needed: int) -> int:
        table = [byte for byte in self._by_count if needed >> byte & 1]
        table += [byte for byte in self._by_count if not needed >> byte & 1][: CODES - len(table)]
        self._tables.append(table)
        self._sets.append(sum(1 << byte for byte in table))
        return len(self._tables) - 1

    def _codes_of(self, table: list[int]) -> torch.Tensor:
        codes = torch.full((256,), NO_CODE, dtype=torch.uint8)
        codes[table] = torch.arange(CODES, dtype=torch.uint8)
        return codes


def _order(words: int) -> list[int]:
    """In which a step's lower bytes lie."""
    return [word_of(byte) for byte in range(words)]


def _upper(weights: torch.Tensor) -> torch.Tensor:
    return (weights.view(torch.int16) >> 8).to(torch.uint8)
