"""Calls of the kernels that write keys and values to their slots."""

import torch

from engine.kernels.cpu.emit import LINE_BYTES
from engine.kernels.cpu.kernel import Kernel, WorkingMemory, share, threads_for
from engine.kernels.cpu.recording import empty
from engine.kernels.cpu.rotary import WORDS, rotate_and_write, write_kv
from engine.kernels.interface import AttentionSpec, HeadNorm, Rotary
from kv_cache.slab import KvSlab


class KvWriter:
    """Writes to slabs of one format, from tensors of one element type: the slab's, unless that
    is quantised."""

    def __init__(self, element: str, quantised: str) -> None:
        self.rotate = Kernel(rotate_and_write, element, WORDS, quantised)
        self._write = Kernel(write_kv, element, WORDS, quantised)
        self._rows = WorkingMemory()

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
        assert qkv.is_contiguous()
        tokens = qkv.shape[0]
        q = empty((tokens, spec.num_heads, spec.head_dim), qkv.dtype)
        threads = threads_for(qkv.numel())
        self.rotate(
            threads,
            qkv.data_ptr(),
            q.data_ptr(),
            positions.data_ptr(),
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            rotary.cos.shape[1],
            0 if norm is None else norm.q_weight.data_ptr(),
            0 if norm is None else norm.k_weight.data_ptr(),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.value_dim,
            slots.data_ptr(),
            tokens,
            share(tokens, threads),
            *_places(slab, layer),
            *self._scratch(spec.head_dim, spec.value_dim),
            0.0 if norm is None else norm.eps,
        )
        return q

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, slab: KvSlab, layer: int, slots: torch.Tensor
    ) -> None:
        k, v = k.contiguous(), v.contiguous()
        tokens, kv_heads, dim = k.shape
        threads = threads_for(k.numel() + v.numel())
        self._write(
            threads,
            k.data_ptr(),
            v.data_ptr(),
            *(0,) * 7,
            kv_heads,
            dim,
            v.shape[2],
            slots.data_ptr(),
            tokens,
            share(tokens, threads),
            *_places(slab, layer),
            *self._scratch(dim, v.shape[2]),
            0.0,
        )

    def _scratch(self, dim: int, value_dim: int) -> tuple[int, int]:
        """A row of fp32 for each thread, and its size. For all threads that there are: where a
        step is repeated, every one of them comes to a call that is shared."""
        row_bytes = -(-max(dim, value_dim) * 4 // LINE_BYTES) * LINE_BYTES
        return self._rows.address(torch.get_num_threads() * row_bytes), row_bytes


def _places(slab: KvSlab, layer: int) -> tuple[int, ...]:
    """Keys and values of block 0 and head 0, the strides in bytes, block size as shift and mask,
    and the keys' scales."""
    itemsize, size = slab.data.itemsize, slab.layout.block_size
    keys = slab.data.data_ptr() + layer * slab.layer_stride * itemsize
    return (
        keys,
        keys + slab.plane_offsets[1] * itemsize,
        slab.block_stride * itemsize,
        slab.head_stride * itemsize,
        size.bit_length() - 1,
        size - 1,
        scales_address(slab, layer),
    )


def scales_address(slab: KvSlab, layer: int) -> int:
    """Of the keys of block 0 and head 0; 0 where the format has none."""
    if not slab.layout.format.quantised:
        return 0
    return slab.scales.data_ptr() + slab.scale_offset(layer, 0) * slab.scales.itemsize
