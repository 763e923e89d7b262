"""Blobs on their way through a communicator, side by side in memory that is no pool's.

A library that is told to receive may write until it is gone. So it never knows the pool: what has
arrived is copied there by the thread that also says that a read has ended.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kv_transfer.block_pairs import Blocks
from kv_transfer.connector import PoolRegion
from kv_transfer.device_memory import device_blobs, device_of

SLICE_BYTES = 8 << 20  # of a message, or one blob


class Staging(Protocol):
    """Two buffers, so that one is filled or emptied while the other is on its way."""

    def slices(self, group: int, blocks: Blocks) -> list[Blocks]: ...

    def buffer(self, turn: int, group: int, blocks: Blocks) -> Tensor: ...

    def put(self, data: bytes) -> Tensor: ...

    def gather(self, group: int, blocks: Blocks, into: Tensor) -> None: ...

    def scatter(self, group: int, blocks: Blocks, source: Tensor) -> None: ...


class _Buffers:
    def __init__(self, regions: Sequence[PoolRegion], device: torch.device) -> None:
        self._blob_bytes = [region.blob_bytes for region in regions]
        self._device = device
        self._pair = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def slices(self, group: int, blocks: Blocks) -> list[Blocks]:
        """One message each. Both ends cut alike, so that each knows the other's sizes."""
        step = max(1, SLICE_BYTES // self._blob_bytes[group])
        return [blocks[start : start + step] for start in range(0, len(blocks), step)]

    def buffer(self, turn: int, group: int, blocks: Blocks) -> Tensor:
        """[blocks, bytes] of a slice, the same for every second turn."""
        num_bytes = len(blocks) * self._blob_bytes[group]
        if self._pair[turn % 2].numel() < num_bytes:
            self._pair[turn % 2] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._settle()  # what was freed may be in use still, and others' streams do not wait
        return self._pair[turn % 2][:num_bytes].view(len(blocks), -1)

    def put(self, data: bytes) -> Tensor:
        copied = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        self._settle()
        return copied

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class HostStaging(_Buffers):
    """NumPy copies at a thread's full rate (8 GB/s), without the interpreter's lock and without
    torch's threads, which spin on the cores that compute."""

    def __init__(self, regions: Sequence[PoolRegion]) -> None:
        super().__init__(regions, torch.device("cpu"))
        self._blobs = [
            np.frombuffer(
                memoryview((ctypes.c_char * region.num_bytes).from_address(region.address)),
                np.uint8,
            ).reshape(region.num_blocks, region.blob_bytes)
            for region in regions
        ]

    def gather(self, group: int, blocks: Blocks, into: Tensor) -> None:
        # with mode "raise" it would copy twice
        np.take(self._blobs[group], blocks, axis=0, out=into.numpy(), mode="clip")

    def scatter(self, group: int, blocks: Blocks, source: Tensor) -> None:
        self._blobs[group][blocks] = source.numpy()


class DeviceStaging(_Buffers):
    """On the GPU, on a stream of its own; each call returns when it is done."""

    def __init__(self, regions: Sequence[PoolRegion]) -> None:
        device = device_of(regions)
        super().__init__(regions, device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._blobs = device_blobs(regions)

    def gather(self, group: int, blocks: Blocks, into: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            torch.index_select(self._blobs[group], 0, self._indices(blocks), out=into)
        self._stream.synchronize()

    def scatter(self, group: int, blocks: Blocks, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            self._blobs[group].index_copy_(0, self._indices(blocks), source)
        self._stream.synchronize()

    def _indices(self, blocks: Blocks) -> Tensor:
        return torch.from_numpy(blocks.astype(np.int64)).to(self._device)
