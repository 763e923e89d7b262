"""The CPU twin of `Kernels`: compiled on this machine at first use, without a C compiler."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from engine.kernels.cpu.activations import CODES, gated_activation
from engine.kernels.cpu.activations import WORDS as ACTIVATION_WORDS
from engine.kernels.cpu.attention import PagedAttention
from engine.kernels.cpu.features import CpuFeatures
from engine.kernels.cpu.kernel import Kernel, share, threads_for
from engine.kernels.cpu.linear import (
    PanelLinear,
    Product,
    make_linear,
    product_of,
    reorders,
    tile_product_of,
)
from engine.kernels.cpu.matrix import TILE_INPUTS
from engine.kernels.cpu.norms import WORDS as NORM_WORDS
from engine.kernels.cpu.norms import rms_norm
from engine.kernels.cpu.packing import WeightMemory
from engine.kernels.cpu.picking import WORDS as PICK_WORDS
from engine.kernels.cpu.picking import pick_rows
from engine.kernels.cpu.recording import OutputPool, collecting, empty, empty_rows, recording
from engine.kernels.cpu.replay import WORDS as CHAIN_WORDS
from engine.kernels.cpu.replay import Replay, chain
from engine.kernels.cpu.writing import KvWriter
from engine.kernels.interface import (
    Activation,
    AttentionSpec,
    Embedding,
    GroupBatch,
    HeadNorm,
    Linear,
    Rotary,
    StepBatch,
)
from kv_cache.layout import KvFormat
from kv_cache.slab import KvSlab


class CpuKernels:
    """Every operation of a decoder step on the CPU, on torch's threads.

    Calls must not overlap, as they share memory: each engine has an instance of its own.
    """

    name = "cpu"

    def __init__(self, features: CpuFeatures | None = None) -> None:
        self._features = features or CpuFeatures.of_this_machine()
        self._by_dtype: dict[torch.dtype, _DtypeKernels] = {}
        self._weights = WeightMemory()
        self._chain = Kernel(chain, "f32", CHAIN_WORDS)
        self._pick = Kernel(pick_rows, "f32", PICK_WORDS)  # which copies bytes
        self._outputs = OutputPool()

    def _of(self, dtype: torch.dtype) -> "_DtypeKernels":
        kernels = self._by_dtype.get(dtype)
        if kernels is None:
            kernels = self._by_dtype[dtype] = _DtypeKernels(self._features, dtype)
        return kernels

    def used_for(self, dtype: torch.dtype, format: KvFormat) -> tuple[Kernel, ...]:
        """Those that every model of this type calls with such a cache; what takes longest to
        compile comes first."""
        of = self._of(dtype)
        cache = of.cache(format)
        product = of.product.kernels if of.product is not None else ()
        small = cache.writer.rotate, of.norm, of.gated, self._pick, self._chain
        return *cache.attention.kernels, *product, *small

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        product = self._of(weight.dtype).product
        return make_linear(product, self._weights, weight, bias)

    def rows_of(self, linear: Linear) -> Embedding | None:
        return linear.rows if isinstance(linear, PanelLinear) else None

    def copies_tied(self, dtype: torch.dtype) -> bool:
        return self._of(dtype).product is None and reorders(dtype)

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay | None]:
        with recording(self._outputs) as recorder:
            result = run()
        replay = Replay(self._chain, recorder.calls) if recorder.complete else None
        return result, replay

    def together(self) -> AbstractContextManager[None]:
        return collecting(self._outputs, lambda calls: Replay(self._chain, calls)())

    def pick_rows(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        assert x.stride(1) == 1
        assert numbers.dtype is torch.int64
        assert numbers.is_contiguous()
        rows, width = numbers.shape[0], x.shape[1]
        out = empty((rows, width), x.dtype)
        threads = threads_for(out.numel())
        self._pick(
            threads,
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            numbers.data_ptr(),
            out.data_ptr(),
            width * x.itemsize,
            rows,
            share(rows, threads),
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._norm(x, residual, weight, eps)

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert x.stride(1) == 1
        assert residual is None or residual.is_contiguous()
        rows, width = x.shape
        out = empty_rows(rows, width, x.dtype)
        threads = threads_for(x.numel())
        self._of(x.dtype).norm(
            threads,
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            0 if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            out.stride(0) * out.itemsize,
            width,
            rows,
            share(rows, threads),
            eps,
        )
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
        dtype = _computed(qkv.dtype, slab)
        writer = self._of(dtype).cache(slab.layout.format).writer
        if qkv.dtype == dtype:
            return writer.rotate_and_write(qkv, positions, rotary, norm, spec, slab, layer, slots)
        cached = qkv.to(dtype)
        q = writer.rotate_and_write(cached, positions, rotary, norm, spec, slab, layer, slots)
        return q.to(qkv.dtype)

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, slab: KvSlab, layer: int, slots: torch.Tensor
    ) -> None:
        dtype = _computed(k.dtype, slab)
        writer = self._of(dtype).cache(slab.layout.format).writer
        writer.write_kv(k.to(dtype), v.to(dtype), slab, layer, slots)

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
        dtype = _computed(q.dtype, slab)
        attention = self._of(dtype).cache(slab.layout.format).attention_for(spec)
        if q.dtype == dtype:
            return attention(q, spec, slab, layer, batch, group, sinks)
        return attention(q.to(dtype), spec, slab, layer, batch, group, sinks).to(q.dtype)

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        assert gate_up.is_contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = empty_rows(rows, width, gate_up.dtype)
        threads = threads_for(out.numel())
        self._of(gate_up.dtype).gated(
            threads,
            gate_up.data_ptr(),
            out.data_ptr(),
            out.stride(0) * out.itemsize,
            width,
            rows,
            share(rows, threads),
            CODES[activation],
        )
        return out


def _computed(dtype: torch.dtype, slab: KvSlab) -> torch.dtype:
    """The type that attention computes in: the cache's, or a quantised one has none of its own."""
    return dtype if slab.layout.format.quantised else slab.data.dtype


class _DtypeKernels:
    """The kernels for tensors of one type; each is compiled when it is first called."""

    def __init__(self, features: CpuFeatures, dtype: torch.dtype) -> None:
        element = features.element(dtype)
        self._element, self._tiles = element, features.multiplies_tiles(dtype)
        self._caches: dict[str, _CacheKernels] = {}
        self.product: Product | None = None
        if features.multiplies_tiles(dtype):
            self.product = tile_product_of()
        elif features.wide_registers or features.narrow_registers:
            self.product = product_of(element)
        self.norm = Kernel(rms_norm, element, NORM_WORDS)
        self.gated = Kernel(gated_activation, element, ACTIVATION_WORDS)

    def cache(self, format: KvFormat) -> "_CacheKernels":
        quantised = format.name if format.quantised else ""
        kernels = self._caches.get(quantised)
        if kernels is None:
            kernels = self._caches[quantised] = _CacheKernels(self._element, quantised, self._tiles)
        return kernels


class _CacheKernels:
    """Those that write and read a cache: of the same type, or of a quantised format."""

    def __init__(self, element: str, quantised: str, tiles: bool) -> None:
        self.writer = KvWriter(element, quantised)
        self.attention = PagedAttention(element, quantised, tiles)
        self.pair_attention = PagedAttention(element, quantised)
        self.plain_attention = PagedAttention(element.removesuffix("_dot"), quantised)

    def attention_for(self, spec: AttentionSpec) -> PagedAttention:
        dims = spec.head_dim, spec.value_dim
        if all(dim % TILE_INPUTS == 0 for dim in dims):
            return self.attention
        # Pairs of bf16 do not divide rows of an odd length.
        return self.pair_attention if spec.head_dim % 2 == 0 else self.plain_attention
