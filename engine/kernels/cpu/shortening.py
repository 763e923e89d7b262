"""Packs bf16 weights in twelve bits each, and reads them as they were."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
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

SAMPLE = 1 << 16  # weights by which the table of most steps is chosen
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
                    place.take_back()
                    return None
                ids[chunk][others] = found.ids
                lower, upper = found.codes.chunk(2, 1)
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
        self._by_count = counts.argsort(descending=True, stable=True)
        self._tables: list[torch.Tensor] = []
        self._bits: list[npt.NDArray[np.uint64]] = []  # which bytes a table has
        self._add(torch.zeros(256, dtype=torch.bool))
        self.first_codes = self._codes_of(self._tables[0])

    def all(self) -> torch.Tensor:
        return torch.stack(self._tables).to(torch.uint8)

    def codes(self, upper: torch.Tensor) -> _Found | None:
        """Of steps, [steps, words] upper bytes; None if one has too many, or all together."""
        has = torch.zeros(len(upper), 256, dtype=torch.bool).scatter_(1, upper.long(), True)
        if has.sum(1).max() > CODES:
            return None
        bits, ids = _bits(has), np.zeros(len(upper), np.uint8)
        left, number = np.arange(len(upper)), 0
        while len(left):
            if number == MOST_TABLES:
                return None
            if number == len(self._tables):
                self._add(has[left[0]])
            fits = ~(bits[left] & ~self._bits[number]).any(1)
            ids[left[fits]] = number
            left, number = left[~fits], number + 1
        every = torch.stack([self._codes_of(table) for table in self._tables])
        found = torch.from_numpy(ids)
        return _Found(found, every[found.long().unsqueeze(1), upper.long()])

    def _add(self, needed: torch.Tensor) -> None:
        """With these bytes, and the most frequent of the others."""
        is_needed = needed[self._by_count]
        table = torch.cat([self._by_count[is_needed], self._by_count[~is_needed]])[:CODES]
        has = torch.zeros(256, dtype=torch.bool)
        has[table] = True
        self._tables.append(table)
        self._bits.append(_bits(has.unsqueeze(0))[0])

    def _codes_of(self, table: torch.Tensor) -> torch.Tensor:
        codes = torch.full((256,), NO_CODE, dtype=torch.uint8)
        codes[table] = torch.arange(CODES, dtype=torch.uint8)
        return codes


def _bits(has: torch.Tensor) -> npt.NDArray[np.uint64]:
    """[count, 256] as [count, 4]."""
    return np.packbits(has.numpy(), axis=1).view(np.uint64)


def _order(words: int) -> list[int]:
    """In which a step's lower bytes lie."""
    return [word_of(byte) for byte in range(words)]


def _upper(weights: torch.Tensor) -> torch.Tensor:
    return (weights.view(torch.int16) >> 8).to(torch.uint8)
