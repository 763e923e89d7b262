"""Blocks that a step moves: in the plan's order, and what is swapped out is waited for."""

import pytest
import torch

from engine.moves import BlockMoves
from engine.step import BlockCopy, HostCopy, StepPlan
from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup
from kv_cache.slab import KvSlab

LAYOUT = BlockLayout(KvGroup((0, 1), 2, (16, 16)), 16, KV_FORMATS["bf16"])


def slab(num_blocks: int, first: int, device: str = "cpu") -> KvSlab:
    """Each blob is full of a number of its own."""
    made = KvSlab.allocate(LAYOUT, num_blocks, torch.device(device))
    for block in range(num_blocks):
        made.blob(block).fill_(first + block)
    return made


def held(made: KvSlab) -> list[int]:
    blobs = [set(made.blob(block).tolist()) for block in range(made.num_blocks)]
    assert all(len(blob) == 1 for blob in blobs)
    return [number for blob in blobs for number in blob]


def test_both_sides_of_a_copy_may_be_handed_out_again_at_once() -> None:
    device, host = slab(6, 10), slab(3, 100)
    plan = StepPlan(
        step=1,
        slices=(),
        num_decode=0,
        num_tokens=0,
        swap_out=(HostCopy(0, 1, 0), HostCopy(0, 2, 1)),
        copies=(BlockCopy(0, 5, 1), BlockCopy(0, 1, 4)),
        swap_in=(HostCopy(0, 2, 0), HostCopy(0, 5, 2)),
    )
    moves = BlockMoves([device], [host])
    moves.issue(plan)
    moves.wait_for_host()
    assert held(host) == [11, 12, 102]
    assert held(device) == [10, 15, 11, 13, 15, 102]


def test_what_is_swapped_out_is_on_the_host_when_a_peer_may_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a device without memory, whose events tell when they are waited for."""
    log: list[str] = []

    class Event:
        def record(self) -> None:
            log.append("after the copies to the host")

        def synchronize(self) -> None:
            log.append("waited for")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    moves = BlockMoves([slab(3, 0, "meta")], [slab(3, 0, "meta")])

    def step(number: int, *swap_out: HostCopy) -> None:
        back = (HostCopy(0, 0, 0),)
        moves.issue(StepPlan(number, (), 0, 0, swap_out=swap_out, swap_in=back))
        log.append("issued")
        moves.wait_for_host()

    step(1)
    step(2, HostCopy(0, 1, 1))
    step(3)
    assert log == ["issued", "after the copies to the host", "issued", "waited for", "issued"]
