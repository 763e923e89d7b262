"""The CPU twin of `Sampler`."""

from operator import is_
from typing import NamedTuple

import numpy as np
import torch

from engine.sampler.cpu import draw, report
from engine.sampler.cpu.launch import EntryPoint
from engine.sampler.cpu.memory import Array, scratch_words
from engine.sampler.interface import Draws, History, IntArray, Logprobs, Sampled
from engine.sampler.table import SamplingTable


class EntryPoints(NamedTuple):
    """What is called for logits of one type; types that cannot be read become fp32."""

    draw: EntryPoint
    report: EntryPoint

    @classmethod
    def of(cls, dtype: torch.dtype) -> "EntryPoints":
        narrow = dtype == torch.bfloat16
        return cls(
            EntryPoint(draw.draw_bf16 if narrow else draw.draw_fp32, draw.NUM_WORDS),
            EntryPoint(report.report_bf16 if narrow else report.report_fp32, report.NUM_WORDS),
        )


class CpuSampler:
    """Compiled at first use, and cached. Runs on torch's threads, of which the number is taken
    when made. Not thread-safe: its working memory is its own."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table
        threads = torch.get_num_threads()
        self._scratch = np.zeros((threads, scratch_words(table.vocab_size)), np.int32)
        self._scratch_words = _address(self._scratch), self._scratch.strides[0]
        self._arrays: tuple[Array | None, ...] = (None,) * 5  # of the table
        self._addresses: tuple[int, ...] = ()
        self._entry_points = {
            dtype: EntryPoints.of(dtype) for dtype in (torch.bfloat16, torch.float32)
        }

    def sample(
        self,
        logits: torch.Tensor,
        draws: Draws,
        history: History,
        bitmask: torch.Tensor | None = None,
    ) -> Sampled:
        logits, table = _readable(logits), self._table
        num_draws = draws.slots.size
        assert _fits(draws.slots, table.rows.size)
        assert all(_is_plain(tensor.numpy()) for tensor in history)
        results = torch.zeros(2, num_draws, dtype=torch.int32)
        self._entry_points[logits.dtype].draw(
            self._threads(num_draws),
            *self._rows(logits, draws.logit_rows),
            _address(draws.slots),
            *self._table_words(),
            0 if bitmask is None else bitmask.data_ptr(),
            0 if bitmask is None else bitmask.shape[1],
            history.tokens.data_ptr(),
            history.tokens.shape[1],
            history.num_tokens.data_ptr(),
            results.data_ptr(),
        )
        logprobs = None
        reported = table.num_reported(draws.slots)
        if reported > 0:
            logprobs = self._report(logits, draws.logit_rows, results[0], reported - 1)
        return Sampled(results, logprobs)

    def token_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> Logprobs:
        rows = np.arange(logits.shape[0], dtype=np.int32)
        return self._report(_readable(logits), rows, targets, num_top)

    def _report(
        self, logits: torch.Tensor, rows: IntArray, targets: torch.Tensor, num_top: int
    ) -> Logprobs:
        num, num_top = rows.size, min(num_top, logits.shape[1])
        assert targets.shape == rows.shape
        assert _fits(targets.numpy(), logits.shape[1])
        result = Logprobs(
            logprob=torch.empty(num),
            rank=torch.empty(num, dtype=torch.int32),
            top_ids=torch.empty(num, num_top, dtype=torch.int32),
            top_logprobs=torch.empty(num, num_top),
        )
        self._entry_points[logits.dtype].report(
            self._threads(num),
            *self._rows(logits, rows),
            targets.data_ptr(),
            num_top,
            *(tensor.data_ptr() for tensor in result),
        )
        return result

    def _table_words(self) -> tuple[int, ...]:
        """Lists move when they have outgrown their place, and seldom; asking numpy is slow."""
        table = self._table
        arrays = (
            table.rows,
            table.allowed.ids,
            table.bias.ids,
            table.bias.values,
            table.stops.ids,
        )
        if not all(map(is_, arrays, self._arrays)):
            self._arrays, self._addresses = arrays, tuple(map(_address, arrays))
        return self._addresses

    def _rows(self, logits: torch.Tensor, rows: IntArray) -> tuple[int, ...]:
        """The common words of a job."""
        vocab = self._table.vocab_size
        assert logits.shape[1] == vocab
        assert _fits(rows, logits.shape[0])
        words = logits.data_ptr(), vocab, rows.size, _address(rows)
        return *words, *self._scratch_words

    def _threads(self, pieces: int) -> int:
        return max(1, min(pieces, self._scratch.shape[0]))


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """fp32 or bf16, row after row; others become fp32."""
    if logits.dtype not in (torch.bfloat16, torch.float32):
        logits = logits.float()
    return logits.contiguous()


def _fits(numbers: Array, limit: int) -> bool:
    """Compiled code takes addresses: what it must never be given, it cannot notice."""
    in_range = numbers.size == 0 or 0 <= numbers.min() <= numbers.max() < limit
    return in_range and _is_plain(numbers)


def _is_plain(numbers: Array) -> bool:
    return numbers.dtype == np.int32 and numbers.flags.c_contiguous


def _address(array: Array) -> int:
    """Not by `__array_interface__`, which describes every column of a table anew."""
    return array.ctypes.data
