"""The memory of one group's blobs, as the kernels see it."""

import ctypes
import mmap
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from kv_cache.huge_pages import anonymous_memory
from kv_cache.layout import BlockLayout, round_up

ELEMENT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}

_PAGE_BYTES = mmap.PAGESIZE
# Whoever maps memory meanwhile waits for the piece to end: 0.35 s for 64 MiB on a slow machine.
_TOUCH_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
# The system call itself. UCX writes over libc's `madvise` when NIXL makes its agent, and whoever is
# inside it then comes back to half an instruction.
_MADVISE = {"x86_64": 28, "aarch64": 233}.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, eq=False)
class KvSlab:
    """`num_blocks` blobs of one layout in one flat tensor; strides below count elements.

    Element (block, head, layer, plane, token, i) lies at
    `block * block_stride + head * head_stride + layer * layer_stride
     + plane_offsets[plane] + token * widths[plane] + i`, in 64-bit arithmetic.
    `layer` counts inside the group. Of a quantised format `scales` is the same memory in fp32,
    and the scale of a row lies at `block * scale_block_stride + head * scale_head_stride
     + scale_offset(layer, plane) + token`. The slab owns its memory; it knows nothing of who
    holds which block.
    """

    layout: BlockLayout
    data: torch.Tensor  # [num_blocks * block_stride]

    @classmethod
    def allocate(
        cls, layout: BlockLayout, num_blocks: int, device: torch.device, pinned: bool = False
    ) -> "KvSlab":
        """Zeroed memory: kernels may read the tail of a block that was never written.

        On a CPU its pages come as they are touched, see `touch`. Those of `pinned` memory, which
        a GPU copies from and to by itself, are there at once; torch takes a power of two of it.
        """
        dtype = ELEMENT_DTYPES[layout.format.name]
        num_bytes = num_blocks * layout.blob_bytes
        if device.type != "cpu" or pinned:
            count = num_bytes // dtype.itemsize
            return cls(layout, torch.zeros(count, dtype=dtype, device=device, pin_memory=pinned))
        return cls(layout, torch.frombuffer(anonymous_memory(num_bytes), dtype=dtype))

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

    @cached_property
    def scales(self) -> torch.Tensor:
        assert self.layout.format.quantised, f"{self.layout.format.name} has no scales"
        return self.data.view(torch.float32)

    @cached_property
    def scale_block_stride(self) -> int:
        return self.layout.blob_bytes // self.layout.format.scale_bytes

    @cached_property
    def scale_head_stride(self) -> int:
        return self.layout.head_bytes // self.layout.format.scale_bytes

    def scale_offset(self, layer: int, plane: int) -> int:
        return self.layout.scale_offset(0, layer, plane, 0) // self.layout.format.scale_bytes

    def touch(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Makes the kernel back the slab with memory now, without changing a byte of it.

        First touch costs 2 to 7 seconds a GiB on some machines, which would fall on the first
        prompts. Meant for a thread of its own, beside whoever uses the slab already; `stop` is
        asked every 2 MiB. False where the system cannot do it.
        """
        if self.data.device.type != "cpu" or self.data.numel() == 0:
            return True
        start = round_up(self.data.data_ptr(), _PAGE_BYTES)
        end = self.data.data_ptr() + self.data.nbytes
        while start < end and not stop():
            size = min(_TOUCH_BYTES, end - start)
            if not _populate(start, size):
                return False
            start += _TOUCH_BYTES
        return True

    def blob(self, block: int) -> torch.Tensor:
        """The block's bytes, [blob_bytes] uint8, sharing the slab's memory."""
        start = block * self.block_stride
        return self.data[start : start + self.block_stride].view(torch.uint8)


def _populate(start: int, size: int) -> bool:
    """False where the system cannot do it."""
    if _MADVISE is None:
        return False
    words = [ctypes.c_long(one) for one in (_MADVISE, start, size, _MADV_POPULATE_WRITE)]
    return not _libc.syscall(*words)
