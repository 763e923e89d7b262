"""Peers in processes of their own that stop, die, or cannot be read without their help."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_cache.events import new_incarnation
from kv_transfer.connector import Connector
from kv_transfer.errors import LinkLost, TransferError
from kv_transfer.nixl_connector import NixlConfig
from kv_transfer.registry import ConnectorConfig, open_connector
from kv_transfer.socket_connector import SocketConfig
from tests.kv_transfer.children import ChildError, ChildHandle, child
from tests.kv_transfer.pools import Pool

LARGE = ((256, 262144),)  # 64 MiB: far more than sockets buffer
ALL = list(range(256))


@asynccontextmanager
async def reader(name: str, pool: Pool) -> AsyncIterator[Connector]:
    config = ConnectorConfig(nixl=NixlConfig(lanes=1), socket=SocketConfig(streams=1))
    connector = await open_connector(name, pool.regions, new_incarnation(), config)
    try:
        yield connector
    finally:
        await connector.close()


async def ended(future: asyncio.Future[None]) -> None:
    await asyncio.wait_for(asyncio.shield(future), 30)


async def test_nothing_arrives_from_a_stopped_holder_after_a_read_has_ended() -> None:
    """Over sockets, the holder stopped in the middle of sending."""
    pool = Pool(LARGE)
    ours = pool.blobs[0]
    async with child("socket", 3, groups=LARGE) as holder, reader("socket", pool) as connector:
        peer = await connector.connect(holder.incarnation, holder.metadata)
        await holder.ask("stop_in_mid_send")
        read = peer.read(0, ALL, ALL)
        await holder.stopped()
        async with asyncio.timeout(30):  # until all that it sent has arrived: half of a request
            while not ours[63, -64:].any():
                await asyncio.sleep(0.002)
        assert not ours[64:].any()
        read.give_up()
        with pytest.raises(TransferError, match="given up"):
            await ended(read.ended)
        ours[:] = 90
        holder.signal(signal.SIGCONT)
        await holder.ask("await_no_readers")  # its thread has met the end
        assert (ours == 90).all()
        await ended(peer.read(0, ALL, ALL).ended)
        assert await holder.ask("blob_sums", 0) == ours.sum(axis=1, dtype=int).tolist()


async def test_nothing_arrives_through_a_communicator_that_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The holder stopped with a message on its way, another behind it, and its reader waiting."""
    from kv_transfer.collective_gloo import GlooGroup  # loads torch

    waits = threading.Event()
    wait = GlooGroup.wait

    def note_and_wait(group: GlooGroup, seconds: float) -> None:
        waits.set()
        wait(group, seconds)

    pool = Pool(LARGE)
    ours = pool.blobs[0]
    async with (
        child("collective", 3, groups=LARGE) as holder,
        reader("collective", pool) as connector,
    ):
        peer = await connector.connect(holder.incarnation, holder.metadata)
        await holder.ask("stop_beside_a_message")
        monkeypatch.setattr(GlooGroup, "wait", note_and_wait)
        read = peer.read(0, ALL, ALL)
        await holder.stopped()
        assert await asyncio.to_thread(waits.wait, 30)
        read.give_up()
        with pytest.raises(TransferError, match="given up"):
            await asyncio.wait_for(asyncio.shield(read.ended), 5)
        ours[:] = 90
        holder.signal(signal.SIGCONT)
        await holder.ask("await_no_readers")  # its thread has met the end
        assert (ours == 90).all()
        await ended(peer.read(0, ALL, ALL).ended)
        assert await holder.ask("blob_sums", 0) == ours.sum(axis=1, dtype=int).tolist()


@pytest.mark.parametrize(
    ("name", "num_reads"), [("socket", 200), ("nixl", 200), ("collective", 30)]
)
async def test_a_killed_holder_ends_its_reads(name: str, num_reads: int) -> None:
    pool = Pool(LARGE)
    async with child(name, 4, groups=LARGE) as holder, reader(name, pool) as connector:
        peer = await connector.connect(holder.incarnation, holder.metadata)
        await ended(peer.read(0, [1], [1]).ended)
        reads = [peer.read(0, ALL, ALL) for _ in range(num_reads)]
        await ended(reads[0].ended)
        holder.signal(signal.SIGKILL)
        for read in reads:
            await asyncio.wait([read.ended], timeout=10)
            assert read.ended.done()
        failures = {type(read.ended.exception()) for read in reads}
        assert failures - {type(None)} == {LinkLost}  # who asks again may find a successor
        late = peer.read(0, ALL, ALL)
        with pytest.raises(LinkLost):
            await ended(late.ended)
        peer.disconnect()
        async with child(name, 5, groups=LARGE) as successor:
            again = await connector.connect(successor.incarnation, successor.metadata)
            await ended(again.read(0, ALL, ALL).ended)
            sums = pool.blobs[0].sum(axis=1, dtype=int).tolist()
            assert await successor.ask("blob_sums", 0) == sums


@pytest.mark.parametrize("name", ["socket", "nixl"])
async def test_a_failed_read_does_not_poison_the_pair(name: str) -> None:
    """The kernel refuses to give the holder's memory away for a while."""
    pool = Pool(LARGE)
    async with child(name, 12, groups=LARGE) as holder, reader(name, pool) as connector:
        sums = await holder.ask("blob_sums", 0)
        peer = await connector.connect(holder.incarnation, holder.metadata)
        await ended(peer.read(0, [1], [1]).ended)
        await holder.ask("hide", True)
        failing = peer.read(0, ALL, ALL)
        with pytest.raises(LinkLost):  # what the link is made anew for
            await ended(failing.ended)
        peer.disconnect()
        await holder.ask("hide", False)
        again = await connector.connect(holder.incarnation, holder.metadata)
        await ended(again.read(0, ALL, ALL).ended)
        assert pool.blobs[0].sum(axis=1, dtype=int).tolist() == sums


async def test_nixl_reads_from_a_stopped_holder() -> None:
    """One-sided, or not at all: emulated, this READ would wait for the holder to go on."""
    pool = Pool(LARGE)
    async with child("nixl", 7, groups=LARGE) as holder, reader("nixl", pool) as connector:
        sums = await holder.ask("blob_sums", 0)
        peer = await connector.connect(holder.incarnation, holder.metadata)
        await ended(peer.read(0, [0], [0]).ended)  # connected, for which it has to help
        holder.signal(signal.SIGSTOP)
        await holder.stopped()
        try:
            await ended(peer.read(0, ALL, ALL).ended)
            assert pool.blobs[0].sum(axis=1, dtype=int).tolist() == sums
            given_up = peer.read(0, ALL, ALL)
            given_up.give_up()
            await asyncio.wait([given_up.ended], timeout=30)
            assert given_up.ended.done()
            pool.blobs[0][:] = 91
        finally:
            holder.signal(signal.SIGCONT)
        await holder.ask("expect_peer")
        await ended(peer.read(0, [0], [0]).ended)
        assert (pool.blobs[0][1:] == 91).all()


async def refused(holder: ChildHandle, other: ChildHandle) -> None:
    peer = await other.connect(holder)
    for _ in range(2):
        with pytest.raises(ChildError) as refusal:
            await other.ask("read", peer, 0, [1, 2], [3, 4])
        assert refusal.value.kind == "OneSidedRefused"
    assert sum(await other.ask("blob_sums", 0)) == 0
    assert sum(await holder.ask("blob_sums", 0)) > 0


async def test_nixl_refuses_tcp_and_both_live_on() -> None:
    """Links that are made again open no sockets, to be refused once more."""
    tcp = {"UCX_TLS": "tcp"}
    async with (
        child("nixl", 8, environment=tcp) as holder,
        child("nixl", environment=tcp) as other,
    ):
        await refused(holder, other)
        once = [num_sockets(end) for end in (holder, other)]
        for _ in range(3):
            with pytest.raises(ChildError, match="OneSidedRefused"):
                await other.connect(holder)
        assert [num_sockets(end) for end in (holder, other)] == once


async def test_nixl_refuses_a_holder_in_its_own_pid_namespace() -> None:
    """As in another pod of the same host; other peers of the same reader are read as before."""
    apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    async with (
        child("nixl", 9, prefix=apart) as far,
        child("nixl", 10) as near,
        child("nixl") as other,
    ):
        near_peer = await other.connect(near)
        await refused(far, other)
        await other.ask("read", near_peer, 0, list(range(48)), list(range(48)))
        assert await other.ask("blob_sums", 0) == await near.ask("blob_sums", 0)


async def test_nixl_links_that_are_made_again_open_no_more_sockets() -> None:
    """UCX closes its end of a connection alone: the peer's would stay, with sockets at both."""
    async with child("nixl", 13) as holder, child("nixl") as other:

        async def link() -> list[int]:
            await holder.ask("expect_peer")
            peer = await other.connect(holder)
            await other.ask("read", peer, 0, [1, 2], [3, 4])
            await other.ask("disconnect", peer)
            return [num_sockets(end) for end in (holder, other)]

        once = await link()
        assert [await link() for _ in range(5)] == [once] * 5


def num_sockets(end: ChildHandle) -> int:
    open_files = Path(f"/proc/{end.process.pid}/fd").iterdir()
    return sum(str(file.readlink()).startswith("socket:") for file in open_files)
