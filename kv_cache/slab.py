"""The memory of one group's blobs, as the kernels see it."""

from dataclasses import dataclass
from functools import cached_property

import torch

from kv_cache.layout import BlockLayout

ELEMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class KvSlab:
    """`num_blocks` blobs of one layout in one flat tensor; strides below count elements.

    Element (block, head, layer, plane, token, i) lies at
    `block * block_stride + head * head_stride + layer * layer_stride
     + plane_offsets[plane] + token * widths[plane] + i`, in 64-bit arithmetic.
    `layer` counts inside the group. The slab owns its memory; it knows nothing of who holds
    which block.
    """

    layout: BlockLayout
    data: torch.Tensor  # [num_blocks * block_stride]

    @classmethod
    def allocate(cls, layout: BlockLayout, num_blocks: int, device: torch.device) -> "KvSlab":
        """Zeroed memory: kernels may read the tail of a block that was never written."""
        dtype = ELEMENT_DTYPES[layout.format.name]
        elements = num_blocks * layout.blob_bytes // dtype.itemsize
        return cls(layout, torch.zeros(elements, dtype=dtype, device=device))

    @property
    def num_blocks(self) -> int:
        return self.data.numel() // self.block_stride

    @cached_property
    def block_stride(self) -> int:
        return self.layout.blob_bytes // self.data.itemsize

    @cached_property
    def head_stride(self) -> int:
        return self.layout.head_bytes // self.data.itemsize

    @cached_property
    def layer_stride(self) -> int:
        return self.layout.layer_bytes // self.data.itemsize

    @cached_property
    def plane_offsets(self) -> tuple[int, ...]:
        return tuple(o // self.data.itemsize for o in self.layout.plane_offsets[:-1])

    def blob(self, block: int) -> torch.Tensor:
        """The block's bytes, [blob_bytes] uint8, sharing the slab's memory."""
        start = block * self.block_stride
        return self.data[start : start + self.block_stride].view(torch.uint8)
