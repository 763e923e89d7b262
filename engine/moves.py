"""Blocks that a step's plan has copied: to the host, from block to block, from the host."""

from collections.abc import Sequence

import torch

from engine.step import StepPlan
from kv_cache.slab import KvSlab


class BlockMoves:
    """Issues copies in the device's order; on a GPU nothing here waits but `wait_for_host`.

    All copies of a step, and its kernels, are on one stream, and host memory is read and written
    by these copies alone. So a block and its place on the host may both be handed out again as
    soon as the plan is made, to whoever uses them on that stream. A peer does not: it fills the
    blocks that it was given past the stream, and may have been told of them once the step is
    launched. So what was swapped out must be on the host by then.
    """

    def __init__(self, slabs: Sequence[KvSlab], host_slabs: Sequence[KvSlab]) -> None:
        """On a GPU the host's are pinned: from other memory every copy would be waited for."""
        self._slabs = slabs
        self._host_slabs = host_slabs
        self._swapped_out: torch.cuda.Event | None = None

    def issue(self, plan: StepPlan) -> None:
        slabs, host_slabs = self._slabs, self._host_slabs
        for group, device_block, host_block in plan.swap_out:
            _copy(slabs[group], device_block, host_slabs[group], host_block)
        if plan.swap_out and slabs[0].data.device.type != "cpu":
            self._swapped_out = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._swapped_out.record()
        for group, source, target in plan.copies:
            _copy(slabs[group], source, slabs[group], target)
        for group, device_block, host_block in plan.swap_in:
            _copy(host_slabs[group], host_block, slabs[group], device_block)

    def wait_for_host(self) -> None:
        """Until what was swapped out is on the host. Those copies are the first of a step that is
        never launched during another, so the rest of it need not be waited for."""
        if self._swapped_out is not None:
            self._swapped_out.synchronize()
            self._swapped_out = None


def _copy(source: KvSlab, block: int, target: KvSlab, to: int) -> None:
    target.blob(to).copy_(source.blob(block), non_blocking=True)
