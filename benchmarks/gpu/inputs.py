"""Random steps over random caches, made on the device; no two sequences share a block."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.interface import AttentionSpec, GroupBatch, StepBatch
from engine.kernels.reference import KEYS, VALUES, plane_view, quantised, scale_view
from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup
from kv_cache.slab import KvSlab

FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PIECE = 1 << 28  # elements filled at a time
QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8")
USUAL_LARGEST = 2.7  # of 128 normal numbers
MASKED_VALUE = 500.0  # behind a sequence's end: shows in any result that it leaks into
Lengths = Sequence[tuple[int, int]]  # (new tokens, all tokens) of each sequence, single ones first


@dataclass(frozen=True, eq=False)
class Paged:
    slab: KvSlab
    batch: StepBatch

    @property
    def group(self) -> GroupBatch:
        return self.batch.groups[0]


def layout_of(
    spec: AttentionSpec, layers: int, block_size: int, dtype: torch.dtype, format: str | None = None
) -> BlockLayout:
    """In the dtype's own format unless another is given."""
    widths = (spec.head_dim, spec.value_dim)
    group = KvGroup(tuple(range(layers)), spec.num_kv_heads, widths, spec.window)
    return BlockLayout(group, block_size, KV_FORMATS[format or FORMATS[dtype]])


def num_blocks(lengths: Lengths, block_size: int) -> int:
    """Those that the sequences fill, and block 0, which nobody owns."""
    return 1 + sum(-(-kv_len // block_size) for _, kv_len in lengths)


def random_queries(
    spec: AttentionSpec, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.randn(num_tokens, spec.num_heads, spec.head_dim, device=device).to(dtype)


def random_slab(layout: BlockLayout, count: int, device: torch.device) -> KvSlab:
    """Normal numbers, also of a quantised format, whose rows then all have the same scale."""
    slab = KvSlab.allocate(layout, count, device)
    step = 1.0 if layout.format.largest is None else USUAL_LARGEST / layout.format.largest
    for start in range(0, slab.data.numel(), PIECE):
        piece = slab.data[start : start + PIECE]
        if layout.format.quantised:
            numbers = torch.randn(piece.shape, device=device)
            piece.copy_(numbers.clamp_(-USUAL_LARGEST, USUAL_LARGEST).div_(step))
        else:
            piece.normal_()
    if layout.format.quantised:
        for layer in range(layout.num_layers):
            for plane in (KEYS, VALUES):
                scale_view(slab, layer, plane).fill_(step)
    return slab


def paged(slab: KvSlab, lengths: Lengths) -> Paged:
    """Tables of blocks in random order."""
    device, size = slab.data.device, slab.layout.block_size
    counts = torch.tensor([-(-kv_len // size) for _, kv_len in lengths])
    order = torch.randperm(int(counts.sum())) + 1
    width = max(int(counts.max()), 1)
    inside = torch.arange(width)[None, :] < counts[:, None]
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    tables[inside] = order.int()
    positions = torch.cat([torch.arange(kv_len - new, kv_len) for new, kv_len in lengths])
    owner = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor([new for new, _ in lengths])
    )
    positions = positions.clamp_min(0)  # of a row that fills a graph up
    slots = tables[owner, positions // size].long() * size + positions % size
    group = GroupBatch(tables.to(device), slots.to(device))
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    batch = StepBatch(
        token_ids=torch.zeros(positions.shape[0], dtype=torch.int64, device=device),
        positions=positions.to(device),
        query_starts=starts.to(device),
        kv_lens=torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32, device=device),
        groups=(group,),
        num_decode=sum(new == 1 for new, _ in lengths),
        max_query_len=max(new for new, _ in lengths),
        max_kv_len=max(kv_len for _, kv_len in lengths),
    )
    return Paged(slab, batch)


def poisoned(
    spec: AttentionSpec,
    lengths: Lengths,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    layer: int = 1,
    format: str | None = None,
) -> Paged:
    """One layer of three is filled. What may never be read is NaN: other layers, spare blocks.
    What must be masked is large: the ends of last blocks, and block 0."""
    spare = 7
    slab = KvSlab.allocate(
        layout_of(spec, 3, block_size, dtype, format),
        num_blocks(lengths, block_size) + spare,
        device,
    )
    fill_with_nan(slab)
    made = paged(slab, lengths)
    owned = num_blocks(lengths, block_size)
    for plane in (KEYS, VALUES):
        view = plane_view(slab, layer, plane)
        rows = torch.randn(view[:owned].shape, device=device).to(dtype)
        rows[0] = MASKED_VALUE
        for (_, kv_len), table in zip(lengths, made.group.block_tables, strict=True):
            if kv_len % block_size:
                rows[int(table[kv_len // block_size]), :, kv_len % block_size :] = MASKED_VALUE
        if slab.layout.format.quantised:
            view[:owned], scale_view(slab, layer, plane)[:owned] = quantised(rows, slab)
        else:
            view[:owned] = rows
    return made


def fill_with_nan(slab: KvSlab) -> None:
    """Of int8 the scales."""
    if slab.layout.format.quantised:
        slab.data.view(torch.uint8).fill_(0xFF)
    else:
        slab.data.fill_(torch.nan)
