"""Communicators of two: who is at the other end, what ends a wait, and that each is for itself."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import trustme

from kv_cache.events import new_incarnation
from kv_transfer import collective_gloo
from kv_transfer.carrier import End
from kv_transfer.collective_connector import CollectivePool
from kv_transfer.collective_gloo import GlooGroup
from kv_transfer.collective_rendezvous import Rendezvous
from kv_transfer.connector import PoolRegion
from kv_transfer.errors import ConnectorUnavailable, IncompatiblePeer, LinkLost, TransferError
from kv_transfer.pool_description import PoolDescription
from kv_transfer.registry import ConnectorConfig, open_connector
from kv_transfer.socket_connector import SocketConfig
from kv_transfer.socket_tls import SocketTls
from tests.kv_transfer.ends import both
from tests.kv_transfer.pools import GROUPS, Pool

CONFIG = SocketConfig()
FORM_S = 5.0


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    """A control connection."""
    both = list(socket.socketpair())
    yield both
    for end in both:
        end.close()


def gloo_pair(ends: list[socket.socket]) -> list[GlooGroup]:
    def make(end: End) -> GlooGroup:
        rendezvous = Rendezvous(ends[end], end, time.monotonic() + FORM_S)
        return GlooGroup(end, rendezvous, "127.0.0.1", FORM_S)

    return [made.result() for made in both(make)]  # type: ignore[misc]


def send(group: GlooGroup, data: torch.Tensor) -> None:
    group.send(data)
    group.wait(10)


def carried(pool: Pool, secret: bytes = b"cluster") -> CollectivePool:
    return CollectivePool(pool.regions, secret, CONFIG)


async def ended(future: asyncio.Future[None]) -> None:
    await asyncio.wait_for(asyncio.shield(future), 30)


def test_an_interrupted_wait_ends_and_nothing_arrives_after_the_close(
    ends: list[socket.socket],
) -> None:
    reader, holder = gloo_pair(ends)
    into = torch.zeros(8 << 20, dtype=torch.uint8)
    reader.receive(into)
    timer = threading.Timer(0.05, reader.interrupt)
    timer.start()
    started = time.monotonic()
    with pytest.raises(ConnectionError):
        reader.wait(60)
    assert time.monotonic() - started < 5
    timer.join()
    reader.close()
    with pytest.raises(ConnectionError):
        send(holder, torch.ones(8 << 20, dtype=torch.uint8))
    assert not into.any()
    holder.close()


def test_an_interrupt_takes_no_message_from_the_thread_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, ends: list[socket.socket]
) -> None:
    """It would wait until its time is up, half a minute, with a buffer and the group's sockets."""
    reader, holder = gloo_pair(ends)
    reader.receive(torch.zeros(4096, dtype=torch.uint8))
    send(holder, torch.ones(4096, dtype=torch.uint8))
    waits: SimpleQueue[Any] = SimpleQueue()
    outcomes: SimpleQueue[str | None] = SimpleQueue()
    waits.put((reader._posted[0], timedelta(seconds=30)))
    waits.put(None)
    reader.interrupt()
    late = threading.Thread(target=collective_gloo._wait, args=(waits, outcomes), daemon=True)
    late.start()
    late.join(5)
    assert not late.is_alive()
    for group in (reader, holder):
        group.close()


def test_one_that_was_interrupted_before_waits_for_nothing(ends: list[socket.socket]) -> None:
    reader, holder = gloo_pair(ends)
    reader.interrupt()
    reader.receive(torch.zeros(4096, dtype=torch.uint8))
    with pytest.raises(ConnectionError, match="interrupted"):
        reader.wait(60)
    for group in (reader, holder):
        group.close()


def test_who_has_another_secret_gets_no_communicator(ends: list[socket.socket]) -> None:
    """As if a stranger had reached the library's port before the peer did."""
    pool = Pool(seed=1)
    secrets = (b"cluster", b"stranger")
    made = both(lambda end: carried(pool, secrets[end]).carry(ends[end], end))
    errors = [one.exception() for one in made]
    assert all(isinstance(error, TransferError | OSError) for error in errors), errors
    assert any("taken its place" in str(error) for error in errors)


def test_what_differs_is_named(ends: list[socket.socket]) -> None:
    def agree(end: End) -> bytes:
        return Rendezvous(ends[end], end, time.monotonic() + FORM_S).agree(f"plan {end}")

    for one in both(agree):
        assert isinstance(error := one.exception(), IncompatiblePeer)
        assert error.field == "communicator"


@pytest.mark.parametrize(
    "said", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00n" * 100, b"", b"\x02\x00\x01\x00\xff\xfe\x00"]
)
def test_a_rendezvous_with_garbage_ends(ends: list[socket.socket], said: bytes) -> None:
    ours, theirs = ends
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError):  # noqa: PT011
        Rendezvous(ours, End.READER, time.monotonic() + FORM_S).agree("plan")


def test_a_rendezvous_waits_no_longer_than_it_may(ends: list[socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        Rendezvous(ends[0], End.HOLDER, time.monotonic() + 0.05).get("address")


def listening() -> set[int]:
    """This process's ports."""
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            sockets.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in sockets}


async def test_links_with_other_peers_live_on_and_strangers_do_no_harm() -> None:
    config = ConnectorConfig(b"cluster")
    ours = Pool()
    reader = await open_connector("collective", ours.regions, new_incarnation(), config)
    before = listening()
    pools = [Pool(seed=seed) for seed in range(3)]
    holders = []
    for pool in pools:
        incarnation = new_incarnation()
        holders.append(
            (
                incarnation,
                await open_connector("collective", pool.regions, incarnation, config),
            )
        )
    peers = [await reader.connect(number, holder.metadata()) for number, holder in holders]
    strangers = []
    for port in listening() - before:  # control, and Gloo's
        for said in (b"GET / HTTP/1.1\r\n\r\n", bytes(64)):
            stranger = socket.create_connection(("127.0.0.1", port))
            stranger.sendall(said)
            strangers.append(stranger)
    assert len(strangers) >= 2 * 6
    await holders[1][1].close()
    blocks = list(range(GROUPS[1][0]))
    for n in (0, 2):
        await ended(peers[n].read(1, blocks, blocks).ended)
        assert (ours.blobs[1] == pools[n].blobs[1]).all()
    with pytest.raises(LinkLost):
        await ended(peers[1].read(1, blocks, blocks).ended)
    for stranger in strangers:
        stranger.close()
    await reader.close()
    for _, holder in holders:
        await holder.close()


async def test_a_large_read_goes_through_two_buffers_in_turns() -> None:
    """More slices than buffers, of which the last is smaller."""
    groups = ((40, 1 << 20),)
    ours, theirs = Pool(groups), Pool(groups, seed=3)
    config = ConnectorConfig(b"cluster")
    incarnation = new_incarnation()
    reader = await open_connector("collective", ours.regions, new_incarnation(), config)
    holder = await open_connector("collective", theirs.regions, incarnation, config)
    peer = await reader.connect(incarnation, holder.metadata())
    remote = list(range(29))
    local = [39 - block for block in remote]
    await ended(peer.read(0, remote, local).ended)
    assert (ours.blobs[0][local] == theirs.blobs[0][remote]).all()
    assert not ours.blobs[0][:11].any()
    await reader.close()
    await holder.close()


def test_what_it_cannot_do_is_named(tmp_path: Path) -> None:
    regions = Pool().regions
    mixed = [*regions, PoolRegion(4096, 1, 4096, memory="cuda")]
    with pytest.raises(ConnectorUnavailable, match="one kind"):
        CollectivePool(mixed, b"", CONFIG)
    with pytest.raises(ConnectorUnavailable, match=r"192\.0\.2\.1"):  # of no machine
        CollectivePool(regions, b"", replace(CONFIG, host="192.0.2.1"))
    certificate = trustme.CA().issue_cert("localhost")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(chain)
    certificate.private_key_pem.write_to_path(key)
    tls = SocketTls.load(str(chain), str(key), None)
    with pytest.raises(ConnectorUnavailable, match="not encrypted"):
        CollectivePool(regions, b"", replace(CONFIG, tls=tls))


async def test_memory_of_another_kind_is_named() -> None:
    pool = Pool()
    connector = await open_connector("collective", pool.regions, 1, ConnectorConfig())
    theirs = tuple(replace(region, memory="cuda") for region in pool.regions)
    with pytest.raises(IncompatiblePeer) as refusal:
        await connector.connect(2, PoolDescription("collective", 2, theirs, b"").encode(b""))
    assert refusal.value.field == "memory"
    await connector.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there NCCL can be loaded")
def test_gpu_memory_without_a_gpu_is_named() -> None:
    region = PoolRegion(4096, 1, 4096, memory="cuda")
    with pytest.raises(ConnectorUnavailable, match="memory: 'cuda'"):
        CollectivePool([region], b"", CONFIG)
