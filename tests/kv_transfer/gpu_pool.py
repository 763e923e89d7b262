"""A pool in a GPU's memory."""

import torch

from kv_transfer.connector import PoolRegion
from tests.kv_transfer.pools import Pool


class GpuPool(Pool):
    """The same bytes in a GPU's memory; `blobs` have them as of the last `fetch`."""

    def __init__(self, groups: tuple[tuple[int, int], ...], seed: int | None) -> None:
        super().__init__(groups, seed)
        self._tensors = [torch.from_numpy(blobs).cuda() for blobs in self.blobs]
        self.regions = [_region(tensor) for tensor in self._tensors]
        torch.cuda.synchronize()

    def fetch(self) -> None:
        for blobs, tensor in zip(self.blobs, self._tensors, strict=True):
            blobs[:] = tensor.cpu().numpy()


def _region(blobs: torch.Tensor) -> PoolRegion:
    num_blocks, blob_bytes = blobs.shape
    return PoolRegion(
        blobs.data_ptr(), num_blocks, blob_bytes, "cuda", blobs.device.index, owner=blobs
    )
