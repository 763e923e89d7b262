"""Calls recorded as a CUDA graph: one launch repeats them all."""

from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import CUDAGraph, graph, graph_pool_handle

from engine.kernels.interface import Replay


class GraphRecorder:
    """Graphs of one engine; they are never replayed at the same time, so that what they need
    between their launches is one memory for all."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        """Runs it once before: what is compiled or allocated for good must not be recorded. What
        is recorded does not run, so the first result is carried over."""
        result = run()
        if self._pool is None:
            self._pool = graph_pool_handle()
        calls = CUDAGraph()
        with graph(calls, pool=self._pool, capture_error_mode="thread_local"):
            recorded = run()
        recorded.copy_(result)
        return recorded, calls.replay
