"""A lease lets go of everything once, and its verdict never lies."""

import pytest

from kv_cache.handover import BlockRun, HeldRange
from kv_cache.transfers import TransferHold
from kv_transfer.lease import Lease, LeaseState


def held(start: int, end: int, block: int) -> HeldRange:
    return HeldRange(start, end, (BlockRun(0, start // 8, (block,)),), (TransferHold(0, (block,)),))


def test_what_was_announced_is_let_go_of_once_and_at_the_end() -> None:
    lease = Lease(8, 20)
    ranges = [held(8, 16, 1), held(16, 20, 2)]
    for one in ranges:
        lease.announce(one)
    lease.offer()
    assert lease.commit() == (True, "")
    assert lease.end() == [*ranges[0].holds, *ranges[1].holds]
    assert lease.end() == []
    assert lease.state is LeaseState.ENDED


def test_a_commit_before_the_end_is_refused() -> None:
    lease = Lease(0, 8)
    lease.announce(held(0, 8, 1))
    verdict = lease.commit()
    assert not verdict.held
    assert "OPEN" in verdict.reason


def test_a_commit_after_the_stream_is_refused() -> None:
    lease = Lease(0, 8)
    lease.announce(held(0, 8, 1))
    lease.offer()
    lease.end()
    assert not lease.commit().held


def test_a_second_commit_is_refused() -> None:
    lease = Lease(0, 8)
    lease.offer()
    assert lease.commit().held
    assert not lease.commit().held


def test_all_is_out_with_the_last_block_or_with_the_end() -> None:
    """Of a prompt that is computed, and of one that is only cached in part."""
    for computed in (True, False):
        lease = Lease(0, 16)
        lease.announce(held(0, 8, 1))
        assert not lease.complete
        if computed:
            lease.announce(held(8, 16, 2))
        else:
            lease.offer()
        assert lease.complete


def test_what_was_released_early_is_never_confirmed() -> None:
    lease = Lease(0, 8)
    lease.announce(held(0, 8, 1))
    assert [h.blocks for h in lease.release_early("a bug")] == [(1,)]
    lease.offer()
    assert lease.commit() == (False, "a bug")
    assert lease.end() == []


def test_ranges_follow_each_other() -> None:
    lease = Lease(0, 8)
    lease.announce(held(0, 8, 1))
    with pytest.raises(AssertionError, match="follow"):
        lease.announce(held(16, 24, 2))
