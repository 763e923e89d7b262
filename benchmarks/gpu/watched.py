"""A model that notes how long the device computes each of its steps."""

import statistics
import time
from collections.abc import Sequence

import torch

from engine.kernels.interface import StepBatch
from engine.models.interface import CausalModel
from kv_cache.slab import KvSlab


class WatchedModel:
    """From the first call of a step's layers to its logits. The device's clock is not read before
    `median_s`, so that nothing waits meanwhile; steps without logits are not counted."""

    def __init__(self, model: CausalModel, device: torch.device) -> None:
        self._model = model
        self._on_host = device.type == "cpu"
        self._started: float | torch.cuda.Event | None = None
        self._spans: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def prepare(self, slabs: Sequence[KvSlab], max_num_seqs: int) -> None:
        self._model.prepare(slabs, max_num_seqs)

    def forward(
        self, batch: StepBatch, slabs: Sequence[KvSlab], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._started = self._now()
        return self._model.forward(batch, slabs, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(hidden)
        if self._started is not None:
            self._spans.append((self._started, self._now()))
            self._started = None
        return logits

    def reset(self) -> None:
        self._spans = []

    def median_s(self) -> float:
        return statistics.median(_seconds(start, end) for start, end in self._spans)

    def _now(self) -> float | torch.cuda.Event:
        if self._on_host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _seconds(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
