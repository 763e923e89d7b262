"""The GPU twin of `Kernels`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from engine.kernels.interface import (
    Activation,
    AttentionSpec,
    Embedding,
    GroupBatch,
    HeadNorm,
    Linear,
    Replay,
    Rotary,
    StepBatch,
)
from engine.kernels.triton.activation import gated_launch
from engine.kernels.triton.decode import decode_launches
from engine.kernels.triton.graphs import GraphRecorder
from engine.kernels.triton.linear import TorchLinear
from engine.kernels.triton.norm import norm_launch
from engine.kernels.triton.prefill import prefill_launch
from engine.kernels.triton.rotate import rotate_launch
from engine.kernels.triton.write import write_launch
from kv_cache.slab import KvSlab

PROGRAMS_PER_SM = 2  # of decode attention; what its shared memory leaves room for
INTERPRETED = triton.knobs.runtime.interpret  # on a CPU, for tests: nothing is launched


class TritonKernels:
    """Launches only: nothing here waits for the device, so every call can be recorded in a graph.

    A graph replays what num_decode, num_seqs and max_query_len decided when it was recorded;
    lengths, tables and slots are read anew from the tensors. Sequences that fill a graph up
    have kv_len 0 and NO_SLOT; their outputs are zeros.
    """

    name = "triton"

    def __init__(self, num_programs: int) -> None:
        """`num_programs` share the work of decode attention."""
        self._num_programs = num_programs
        self._graphs = GraphRecorder()

    @classmethod
    def for_device(cls, device: torch.device) -> "TritonKernels":
        properties = torch.cuda.get_device_properties(device)
        return cls(PROGRAMS_PER_SM * properties.multi_processor_count)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def rows_of(self, linear: Linear) -> Embedding | None:
        return None

    def copies_tied(self, dtype: torch.dtype) -> bool:
        return False

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay | None]:
        if INTERPRETED:
            return run(), None
        return self._graphs.record(run)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pick_rows(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, numbers)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        norm_launch(x, None, weight, eps, out).run()
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        norm_launch(x, residual, weight, eps, out).run()
        return out

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rotary: Rotary,
        norm: HeadNorm | None,
        spec: AttentionSpec,
        slab: KvSlab,
        layer: int,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        q = qkv.new_empty(qkv.shape[0], spec.num_heads, spec.head_dim)
        rotate_launch(qkv, positions, rotary, norm, spec, slab, layer, slots, q).run()
        return q

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, slab: KvSlab, layer: int, slots: torch.Tensor
    ) -> None:
        write_launch(k, v, slab, layer, slots).run()

    def attention(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        slab: KvSlab,
        layer: int,
        batch: StepBatch,
        group: GroupBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = q.new_empty(q.shape[0], spec.num_heads, spec.value_dim)
        if batch.num_decode > 0:
            for launch in decode_launches(
                q, spec, slab, layer, batch, group, sinks, out, self._num_programs
            ):
                launch.run()
        if batch.num_seqs > batch.num_decode:
            prefill_launch(q, spec, slab, layer, batch, group, sinks, out).run()
        return out

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        gated_launch(gate_up, activation, out).run()
        return out
