"""Paged attention: which kernel serves which sequences of a step, and with what memory."""

import torch

from engine.kernels.cpu import decode, decode_state, prefill, prefill_state, tile_prefill
from engine.kernels.cpu.kernel import Kernel, WorkingMemory
from engine.kernels.cpu.paged import WORDS
from engine.kernels.cpu.recording import empty_rows
from engine.kernels.cpu.vectors import LOG2_E
from engine.kernels.cpu.writing import scales_address
from engine.kernels.interface import AttentionSpec, GroupBatch, StepBatch
from kv_cache.slab import KvSlab

EVERYTHING = 1 << 30  # the window of a layer without one, in tokens


class PagedAttention:
    """Attention over slabs of one format. Owns scratch memory: calls must not overlap."""

    def __init__(self, element: str, quantised: str, tiles: bool = False) -> None:
        many = (tile_prefill.tile_prefill, "bf16_tiles") if tiles else (prefill.prefill, element)
        self._decode = Kernel(decode.decode, element, WORDS, quantised)
        self._prefill = Kernel(*many, WORDS, quantised)
        self._tiles = tiles
        self._scratch, self._partials = WorkingMemory(), WorkingMemory()
        self._arrivals = WorkingMemory()  # zero between calls

    @property
    def kernels(self) -> tuple[Kernel, Kernel]:
        return self._decode, self._prefill

    def __call__(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        slab: KvSlab,
        layer: int,
        batch: StepBatch,
        group: GroupBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert q.is_contiguous()
        assert group.block_tables.dtype is torch.int32
        tokens, heads, dim = q.shape[0], spec.num_heads, spec.value_dim
        out = empty_rows(tokens, heads * dim, q.dtype).view(tokens, heads, dim)
        num_decode, num_seqs = batch.num_decode, batch.num_seqs
        if num_decode:
            self._run(self._decode, 0, num_decode, q, out, spec, slab, layer, batch, group, sinks)
        if num_decode < num_seqs:
            self._run(
                self._prefill, num_decode, num_seqs, q, out, spec, slab, layer, batch, group, sinks
            )
        return out

    def _run(
        self,
        kernel: Kernel,
        first: int,
        end: int,
        q: torch.Tensor,
        out: torch.Tensor,
        spec: AttentionSpec,
        slab: KvSlab,
        layer: int,
        batch: StepBatch,
        group: GroupBatch,
        sinks: torch.Tensor | None,
    ) -> None:
        threads = torch.get_num_threads()
        itemsize = q.itemsize
        cached = slab.data.itemsize
        queries = spec.num_heads // spec.num_kv_heads
        if kernel is self._decode:
            scratch = decode_state.scratch_bytes(queries, spec.head_dim, spec.value_dim, itemsize)
            partials, arrivals = self._partial_memory(spec, end - first, batch.max_kv_len)
        else:
            scratch = (
                tile_prefill.scratch_bytes(spec.head_dim, spec.value_dim)
                if self._tiles
                else prefill_state.scratch_bytes(spec.head_dim, spec.value_dim, itemsize)
            )
            partials = arrivals = 0
        scratch = -(-scratch // 4096) * 4096
        keys = slab.data.data_ptr() + layer * slab.layer_stride * cached
        scale, cap = spec.scale * LOG2_E, 0.0
        if spec.soft_cap is not None:
            scale, cap = 2 * scale / spec.soft_cap, spec.soft_cap * LOG2_E
        tables = group.block_tables
        kernel(
            threads,
            q.data_ptr(),
            out.data_ptr(),
            out.stride(0) * itemsize,
            keys,
            keys + slab.plane_offsets[1] * cached,
            scales_address(slab, layer),
            slab.block_stride * cached,
            slab.head_stride * cached,
            slab.layout.block_size.bit_length() - 1,
            tables.data_ptr(),
            tables.stride(0) * tables.itemsize,
            batch.kv_lens.data_ptr(),
            batch.query_starts.data_ptr(),
            first,
            end,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.value_dim,
            EVERYTHING if spec.window is None else spec.window,
            self._scratch.address(threads * scratch),
            scratch,
            partials,
            arrivals,
            0 if sinks is None else sinks.data_ptr(),
            scale,
            cap,
        )

    def _partial_memory(
        self, spec: AttentionSpec, num_seqs: int, max_kv_len: int
    ) -> tuple[int, int]:
        """Room for the pieces of long sequences and their number; 0 if every sequence is one
        piece a head."""
        reach = max_kv_len if spec.window is None else min(max_kv_len, spec.window)
        # A window that begins inside a piece touches one piece more than its length fills.
        splits = reach // decode_state.SPLIT + 2
        if max_kv_len <= decode_state.SPLIT:
            return 0, 0
        pieces = num_seqs * spec.num_kv_heads
        queries = spec.num_heads // spec.num_kv_heads
        size = pieces * splits * decode_state.partial_bytes(queries, spec.value_dim)
        return self._partials.address(size), self._arrivals.address(pieces * 8)
