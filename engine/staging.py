"""What a step hands to the device: many small arrays, on a GPU by one copy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.generic]

ALIGN_BYTES = 16  # Triton compiles anew for pointers that 16 does not divide
FIRST_BYTES = 1 << 16


class Place(NamedTuple):
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Pinned:
    """One piece of pinned memory, and the copy that was last made from it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def put(self, arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
        places = placed(arrays)
        total = places[-1].start + places[-1].num_bytes
        if self._copied is not None:
            self._copied.synchronize()
        if total > self._memory.numel():
            size = max(FIRST_BYTES, 1 << (total - 1).bit_length())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        host = self._memory[:total]
        fill(host, arrays, places)
        there = host.to(device, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()
        return views(there, places)


class Staging:
    """Owns the pinned memory that copies to a GPU start from.

    A copy from pageable memory waits until the driver has staged it, one after the other; one
    from pinned memory is asynchronous, and as dear as the smallest of them. Two pieces take
    turns: the copy of a step may wait, on the device, for all of the step before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._next, self._after = Pinned(), Pinned()

    def put(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Once a step. On a CPU the arrays' own memory."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        self._next, self._after = self._after, self._next
        return self._after.put(arrays, self.device)


def placed(arrays: Sequence[Array]) -> list[Place]:
    """One behind the other, each aligned."""
    places, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(array[:0]).dtype
        places.append(Place(start, array.nbytes, dtype, array.shape))
        start += -(-array.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return places


def fill(host: torch.Tensor, arrays: Sequence[Array], places: Sequence[Place]) -> None:
    raw = host.numpy()
    for array, place in zip(arrays, places, strict=True):
        into = raw[place.start : place.start + place.num_bytes]
        into.view(array.dtype).reshape(array.shape)[...] = array


def views(packed: torch.Tensor, places: Sequence[Place]) -> list[torch.Tensor]:
    return [packed[p.start : p.start + p.num_bytes].view(p.dtype).view(p.shape) for p in places]
