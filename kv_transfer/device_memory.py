"""A GPU's pool as torch sees it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kv_transfer.connector import PoolRegion


def device_of(regions: Sequence[PoolRegion]) -> torch.device:
    return torch.device("cuda", regions[0].device)


def device_blobs(regions: Sequence[PoolRegion]) -> list[Tensor]:
    """[block, byte] uint8 for each group, in the regions' own memory."""
    device = device_of(regions)
    return [torch.as_tensor(_DeviceMemory(region), device=device) for region in regions]


class _DeviceMemory:
    """A region as torch takes memory from others, without a copy."""

    def __init__(self, region: PoolRegion) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (region.num_blocks, region.blob_bytes),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 2,
        }
