"""What an unfinished read may still write to stays out of use until it has ended."""

import asyncio

from kv_cache.transfers import TransferHold
from kv_transfer.quarantine import Quarantine, Unfinished
from tests.kv_transfer.fakes import FakePeerPool, FakeRead, Memory


def unfinished(*blocks: int) -> tuple[Unfinished, FakeRead, TransferHold]:
    pool = FakePeerPool(Memory(8), Memory(8), by_hand=True)
    read = pool.read(0, blocks, blocks)
    return Unfinished(0, blocks, read), read, TransferHold(0, blocks)


async def test_blocks_return_when_their_read_ends_and_not_before() -> None:
    returned: list[TransferHold] = []
    quarantine = Quarantine(2, returned.append)
    (first, first_read, first_hold), (second, second_read, second_hold) = (
        unfinished(1, 2),
        unfinished(3, 4),
    )
    quarantine.keep([first, second], [first_hold, second_hold])
    assert (quarantine.num_reads, quarantine.num_blocks) == (2, 4)
    assert str(quarantine.problem) == "4 blocks are in quarantine, at most 2 may be"
    await asyncio.sleep(0)
    assert returned == []
    second_read.finish()
    await asyncio.sleep(0)
    assert returned == [second_hold]
    assert quarantine.num_blocks == 2
    assert not quarantine.problem
    first_read.fail()
    await asyncio.sleep(0)
    assert returned == [second_hold, first_hold]
    assert (quarantine.num_reads, quarantine.num_blocks, quarantine.num_ever) == (0, 0, 2)


async def test_a_read_that_ended_meanwhile_returns_its_blocks_at_once() -> None:
    returned: list[TransferHold] = []
    quarantine = Quarantine(3, returned.append)
    one, read, hold = unfinished(5)
    read.finish()
    quarantine.keep([one], [hold])
    await asyncio.sleep(0)
    assert returned == [hold]
    assert quarantine.num_blocks == 0
