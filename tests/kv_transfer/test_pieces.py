"""Reads in pieces, block pairs, descriptions and checksums, without any connector."""

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.block_pairs import BlockPairs, runs
from kv_transfer.checksum import checksum
from kv_transfer.connector import PoolRegion
from kv_transfer.errors import TransferError
from kv_transfer.piece_read import Backlog, PieceRead
from kv_transfer.pool_description import PoolDescription
from tests.kv_transfer.pools import Pool


def test_no_proof_before_the_last_open_piece() -> None:
    """Whatever the order of takes, ends, failures and giving up, on any thread."""

    @settings(max_examples=200)
    @given(st.integers(0, 5), st.lists(st.sampled_from(["take", "finish", "fail", "give_up"])))
    def play(num_pieces: int, acts: list[str]) -> None:
        async def run() -> None:
            read = PieceRead(range(num_pieces), 10)
            num_open, left, failed = 0, num_pieces, False
            for act in acts:
                over = not num_open and not left
                if act == "take" and read.take() is not None:
                    num_open, left = num_open + 1, left - 1
                elif act in ("finish", "fail") and num_open:
                    read.finish(TransferError("x") if act == "fail" else None)
                    num_open -= 1
                elif act == "give_up":
                    read.give_up()
                else:
                    continue
                if act in ("fail", "give_up") and not over:
                    failed, left = True, 0
                await asyncio.sleep(0)
                assert read.ended.done() == (not num_open and not left)
            if read.ended.done():
                assert (read.ended.exception() is not None) == failed

        asyncio.run(run())

    play()


async def test_a_short_read_is_not_behind_a_long_one() -> None:
    backlog: Backlog[int] = Backlog()
    long, short = PieceRead(range(100), 0), PieceRead(range(2), 0)
    backlog.put(long)
    backlog.put(short)
    order = []
    for _ in range(4):
        found = backlog.take()
        assert found
        order.append(found[0])
    assert order == [long, short, long, short]


@pytest.mark.parametrize("end", [Backlog.close, Backlog.end])
async def test_threads_leave_a_closed_backlog(end: Callable[[Backlog[int]], None]) -> None:
    backlog: Backlog[int] = Backlog()
    done: list[int] = []

    def work() -> None:
        while found := backlog.wait():
            found[0].finish()
            done.append(found[1])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    read = PieceRead(range(50), 0)
    backlog.put(read)
    await asyncio.wait_for(read.ended, 30)
    end(backlog)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert sorted(done) == list(range(50))
    late = PieceRead(range(1), 0)
    backlog.put(late)
    with pytest.raises(TransferError, match="closed"):
        await asyncio.wait_for(late.ended, 30)


async def test_an_ended_backlog_hands_out_what_it_has() -> None:
    backlog: Backlog[int] = Backlog()
    read = PieceRead(range(2), 0)
    backlog.put(read)
    backlog.end()
    assert [found[1] for _ in range(2) if (found := backlog.wait())] == [0, 1]
    assert backlog.wait() is None


@given(st.lists(st.integers(0, 30), max_size=40))
def test_runs_are_the_blocks_in_order(blocks: list[int]) -> None:
    found = runs(np.array(blocks, np.int32))
    assert [first + i for first, count in found for i in range(count)] == blocks
    assert all(a + n != b for (a, n), (b, _) in zip(found, found[1:], strict=False))


@given(st.integers(1, 200_000), st.integers(0, 40))
def test_pieces_are_the_pairs_in_order(max_bytes: int, num_blocks: int) -> None:
    pool = Pool()
    blocks = list(range(num_blocks))
    pairs = BlockPairs.checked(pool.regions, pool.regions, 0, blocks[::-1], blocks)
    pieces = pairs.pieces(max_bytes)
    assert [b for p in pieces for b in p.local] == blocks
    assert [b for p in pieces for b in p.remote] == blocks[::-1]
    assert sum(p.num_bytes for p in pieces) == pairs.num_bytes == num_blocks * 4096
    assert all(p.num_bytes <= max(max_bytes, 4096) for p in pieces)


REGIONS = st.builds(
    PoolRegion,
    address=st.integers(0, 2**47),
    num_blocks=st.integers(1, 2**31 - 1),
    blob_bytes=st.integers(1, 2**28),
    memory=st.sampled_from(["cpu", "cuda"]),
    device=st.integers(0, 15),
)


@given(
    st.lists(REGIONS, min_size=1, max_size=4),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=50),
    st.binary(max_size=80),
)
def test_a_description_is_read_back(
    regions: list[PoolRegion], incarnation: int, payload: bytes, secret: bytes
) -> None:
    made = PoolDescription("socket", incarnation, tuple(regions), payload)
    assert PoolDescription.decode(made.encode(secret), "socket", secret) == made


@pytest.mark.parametrize(
    "region",
    [
        PoolRegion(2**64 - 4096, 2, 4096),
        PoolRegion(0, 2**31, 1),
        PoolRegion(0, 0, 4096),
        PoolRegion(0, 1, 0),
    ],
)
def test_a_region_that_cannot_be_is_refused(region: PoolRegion) -> None:
    """Even from a peer that has the secret."""
    data = PoolDescription("socket", 1, (region,), b"").encode(b"s")
    with pytest.raises(TransferError, match="metadata"):
        PoolDescription.decode(data, "socket", b"s")


def test_a_checksum_sees_every_bit_and_place() -> None:
    pool = Pool(((4, 4096),), seed=3)
    region, blobs = pool.regions[0], pool.blobs[0]
    good = checksum(region, 1)
    seen = {good}
    for byte in (0, 1, 3, 4, 7, 8, 2047, 4092, 4095):
        for bit in range(8):
            blobs[1, byte] ^= 1 << bit
            seen.add(checksum(region, 1))
            blobs[1, byte] ^= 1 << bit
    assert len(seen) == 1 + 9 * 8
    assert checksum(region, 1) == good
    blobs[0] = blobs[1]
    assert checksum(region, 0) == good, "the same bytes in another block"
    blobs[0, [15, 4095]] ^= 0x80  # the top bits of two words
    blobs[2] = blobs[1]
    blobs[2, :8], blobs[2, 8:16] = blobs[1, 8:16], blobs[1, :8]
    blobs[3] = 0
    assert len({good, *(checksum(region, b) for b in (0, 2, 3))}) == 4


def test_a_checksum_is_the_same_everywhere() -> None:
    """Peers of other versions compare it: weights and formula are part of the wire."""
    pool = Pool(((1, 4096),))
    pool.blobs[0][0] = np.arange(4096) % 251
    assert checksum(pool.regions[0], 0) == 0x19D93BEED2397096
