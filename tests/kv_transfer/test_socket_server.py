"""The server meets whoever reaches its port: strangers, slow ones, too many, late ones."""

import asyncio
import contextlib
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer import socket_server
from kv_transfer import socket_wire as wire
from kv_transfer.errors import ConnectorUnavailable, IncompatiblePeer, TransferError
from kv_transfer.socket_connector import SocketConfig, SocketConnector
from kv_transfer.socket_memory import PoolBytes
from kv_transfer.socket_server import ServerLimits, SocketServer
from kv_transfer.socket_tls import SocketTls
from tests.kv_transfer.pools import Pool

SECRET = b"cluster"
INCARNATION = 77
LIMITS = ServerLimits(max_connections=6, answer_s=1.0, stall_s=1.0)


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(((64, 65536), (8, 4096)), seed=1)


@pytest.fixture(scope="module")
def server(pool: Pool) -> Iterator[SocketServer]:
    yield from serving(pool, ServerLimits())


@pytest.fixture(scope="module")
def hasty(pool: Pool) -> Iterator[SocketServer]:
    """Of few connections, for which it does not wait long."""
    yield from serving(pool, LIMITS)


def serving(pool: Pool, limits: ServerLimits) -> Iterator[SocketServer]:
    address = ("127.0.0.1", 0)
    made = SocketServer(PoolBytes(pool.regions), INCARNATION, SECRET, address, None, limits)
    yield made
    made.close()
    assert not made._connections


def dial(server: SocketServer) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(10)
    return sock


def greet(server: SocketServer) -> socket.socket:
    sock = dial(server)
    wire.greet_server(sock, SECRET, INCARNATION, time.monotonic() + 10)
    sock.settimeout(10)
    return sock


def request(group: int, *blocks: int) -> bytes:
    return wire.pack_request(group, b"".join(b.to_bytes(4, "little") for b in blocks))


def is_served(server: SocketServer, pool: Pool) -> None:
    with greet(server) as sock:
        sock.sendall(request(1, 7, 2, 3))
        assert wire.receive_answer(sock) is wire.Answer.OK
        want = b"".join(pool.blobs[1][b].tobytes() for b in (7, 2, 3))
        assert wire.receive(sock, len(want)) == want


def ends(sock: socket.socket) -> bool:
    """The server closes the connection, before our own timeout."""
    try:
        while sock.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    return True


def test_garbage_ends_its_own_connection(server: SocketServer, pool: Pool) -> None:
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=46, max_size=300), st.booleans())
    def send(garbage: bytes, with_magic: bool) -> None:
        with dial(server) as sock:
            sock.sendall((b"KVRS" if with_magic else b"") + garbage)
            with contextlib.suppress(OSError):  # it may have hung up already
                sock.shutdown(socket.SHUT_WR)
            assert ends(sock)

    send()
    is_served(server, pool)


@pytest.mark.parametrize(
    "bad",
    [
        request(2, 0),
        request(65535),
        request(0, 64),
        request(1, 1, 8),
        request(0, 2**32 - 1),
        wire._REQUEST.pack(0, wire.MAX_REQUEST_BLOCKS + 1),
        wire._REQUEST.pack(0, 2**32 - 1),
    ],
)
def test_a_request_for_what_is_not_there_is_refused(
    server: SocketServer, pool: Pool, bad: bytes
) -> None:
    with greet(server) as sock:
        sock.sendall(bad)
        assert wire.receive_answer(sock) is wire.Answer.BAD_REQUEST
        assert ends(sock)
    is_served(server, pool)


@pytest.mark.parametrize("said", [b"", b"KVRS", wire._HELLO.pack(b"KVRS", 1, 77, bytes(32))])
def test_a_half_open_handshake_is_cut(hasty: SocketServer, pool: Pool, said: bytes) -> None:
    with dial(hasty) as sock:
        sock.sendall(said)
        assert ends(sock)
    is_served(hasty, pool)


def test_a_request_that_does_not_go_on_is_cut(hasty: SocketServer, pool: Pool) -> None:
    with greet(hasty) as sock:
        sock.sendall(wire._REQUEST.pack(0, 5) + bytes(4))
        assert ends(sock)
    is_served(hasty, pool)


def test_a_reader_that_takes_nothing_is_cut(hasty: SocketServer, pool: Pool) -> None:
    with greet(hasty) as sock:
        sock.sendall(request(0, *(list(range(64)) * 16)))  # 64 MiB, more than is buffered
        is_served(hasty, pool)  # meanwhile
        poll = select.poll()
        poll.register(sock, select.POLLHUP)
        assert poll.poll(10_000)


def test_an_idle_reader_is_kept(hasty: SocketServer, pool: Pool) -> None:
    with greet(hasty) as sock, dial(hasty) as late:
        assert ends(late)  # the deadline of a handshake has passed for both
        sock.sendall(request(0))
        assert wire.receive_answer(sock) is wire.Answer.OK


def left(server: SocketServer) -> None:
    """Its threads have seen the ends of the connections that we have closed."""
    deadline = time.monotonic() + 30
    while server._connections and time.monotonic() < deadline:
        os.sched_yield()
    assert not server._connections


def test_more_connections_than_allowed_are_turned_away(hasty: SocketServer, pool: Pool) -> None:
    left(hasty)  # by those of the test before
    socks = [greet(hasty) for _ in range(LIMITS.max_connections)]
    for _ in range(3):
        with (
            dial(hasty) as one_more,
            pytest.raises(TransferError, match="as many connections") as refused,
        ):
            wire.greet_server(one_more, SECRET, INCARNATION, time.monotonic() + 10)
        assert refused.value.retryable
    for sock in socks:
        sock.close()
    left(hasty)
    is_served(hasty, pool)


def test_strangers_push_out_one_another_and_no_peer(pool: Pool) -> None:
    limits = replace(LIMITS, answer_s=60.0)
    with (
        contextlib.contextmanager(serving)(pool, limits) as server,
        contextlib.ExitStack() as stack,
    ):
        peers = [stack.enter_context(greet(server)) for _ in range(limits.max_connections - 1)]
        silent = [stack.enter_context(dial(server)) for _ in range(4 * limits.max_connections)]
        assert ends(silent[0])  # whose time is not over
        is_served(server, pool)
        for sock in peers:
            sock.sendall(request(0))
            assert wire.receive_answer(sock) is wire.Answer.OK
        assert len(server._connections) < 2 * limits.max_connections


def test_a_lack_of_descriptors_is_told_once_a_minute(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_failed = 0
    accept = socket.socket.accept
    listeners: list[socket.socket] = []

    def fail(listener: socket.socket) -> Any:
        nonlocal num_failed
        if listener not in listeners:  # another test's
            return accept(listener)
        num_failed += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def wait_for(num_more: int) -> None:
        deadline, wanted = time.monotonic() + 30, num_failed + num_more
        while num_failed < wanted and time.monotonic() < deadline:
            os.sched_yield()
        assert num_failed >= wanted

    with contextlib.contextmanager(serving)(pool, LIMITS) as server:
        listeners.append(server._listener)
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", fail)
            wait_for(5)
            (told,) = caplog.messages
            assert "Too many open files; raise the limit of open files (ulimit -n)" in told
            patch.setattr(socket_server, "_TOLD_S", 0.0)
            wait_for(5)
            assert len(caplog.messages) > 3
        is_served(server, pool)


def test_neither_end_trusts_another_secret(server: SocketServer, pool: Pool) -> None:
    with dial(server) as sock, pytest.raises(TransferError, match="secret"):
        wire.greet_server(sock, b"guess", INCARNATION, time.monotonic() + 10)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        answers: list[bool] = []
        deadline = time.monotonic() + 5
        thread = threading.Thread(
            target=lambda: answers.append(
                wire.greet_reader(theirs, SECRET, 1, deadline, lambda: True)
            )
        )
        thread.start()
        ours.sendall(wire._HELLO.pack(b"KVRS", 1, 1, bytes(32)))
        wire.receive(ours, 64)
        ours.sendall(bytes(32))  # not knowing the secret
        assert wire.receive_answer(ours) is wire.Answer.WRONG_SECRET
        thread.join()
        assert answers == [False]


def test_a_reader_of_another_incarnation_is_told(server: SocketServer) -> None:
    with dial(server) as sock, pytest.raises(IncompatiblePeer, match="incarnation"):
        wire.greet_server(sock, SECRET, INCARNATION + 1, time.monotonic() + 10)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def tls(authority: trustme.CA, folder: Path) -> SocketTls:
    certificate = authority.issue_cert("127.0.0.1")
    folder.mkdir()
    authority.cert_pem.write_to_path(str(folder / "authority"))
    certificate.private_key_pem.write_to_path(str(folder / "key"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "certificate"))
    return SocketTls.load(
        str(folder / "certificate"), str(folder / "key"), str(folder / "authority")
    )


async def test_blobs_travel_over_tls(authority: trustme.CA, tmp_path: Path) -> None:
    config = SocketConfig(tls=tls(authority, tmp_path / "tls"))
    theirs, ours = Pool(((256, 65536),), seed=3), Pool(((256, 65536),))
    holder = SocketConnector(theirs.regions, 1, SECRET, config)
    reader = SocketConnector(ours.regions, 2, SECRET, config)
    peer = await reader.connect(1, holder.metadata())
    blocks = list(range(256))
    await asyncio.wait_for(peer.read(0, blocks[::-1], blocks).ended, 30)
    assert (ours.blobs[0] == theirs.blobs[0][::-1]).all()
    given_up = peer.read(0, blocks, blocks)
    given_up.give_up()
    await asyncio.wait([given_up.ended], timeout=30)
    assert given_up.ended.done()
    await asyncio.wait_for(peer.read(0, blocks, blocks).ended, 30)
    await reader.close()
    await holder.close()


async def test_without_the_authoritys_certificate_nothing_is_read(
    authority: trustme.CA, tmp_path: Path
) -> None:
    pool = Pool(seed=3)
    config = SocketConfig(tls=tls(authority, tmp_path / "ours"))
    stranger = SocketConfig(tls=tls(trustme.CA(), tmp_path / "theirs"))
    holder = SocketConnector(pool.regions, 1, SECRET, config)
    for other in (SocketConfig(limits=LIMITS), stranger):
        reader = SocketConnector(Pool().regions, 2, SECRET, other)
        with pytest.raises(TransferError, match="broke"):
            await reader.connect(1, holder.metadata())
        await reader.close()
    await holder.close()


async def test_with_an_authority_those_of_the_machine_count_for_nothing(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = trustme.CA()
    public.cert_pem.write_to_path(str(tmp_path / "public"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "public"))
    ours, theirs = tls(authority, tmp_path / "ours"), tls(public, tmp_path / "theirs")
    anyone = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    anyone.load_cert_chain(tmp_path / "theirs/certificate", tmp_path / "theirs/key")
    impostor = SocketConfig(tls=replace(theirs, server=anyone))
    holder = SocketConnector(Pool(seed=3).regions, 1, SECRET, impostor)
    reader = SocketConnector(Pool().regions, 2, SECRET, SocketConfig(tls=ours))
    with pytest.raises(TransferError, match="CERTIFICATE_VERIFY_FAILED"):
        await reader.connect(1, holder.metadata())
    await reader.close()
    await holder.close()


async def is_reached(config: SocketConfig) -> None:
    """A holder by a reader, where that one is told to look."""
    holder = SocketConnector(Pool(seed=3).regions, 1, SECRET, config)
    reader = SocketConnector(Pool().regions, 2, SECRET, SocketConfig())
    peer = await reader.connect(1, holder.metadata())
    await asyncio.wait_for(peer.read(0, [0], [0]).ended, 30)
    await reader.close()
    await holder.close()


async def test_every_address_of_a_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def both(host: Any, *arguments: Any, **named: Any) -> list[Any]:
        if host != b"of-both-kinds":
            return resolve(host, *arguments, **named)
        return resolve("::1", *arguments, **named) + resolve("127.0.0.1", *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", both)
    await is_reached(SocketConfig(advertise="of-both-kinds"))


async def test_who_listens_at_any_address_is_reached_by_each_kind() -> None:
    await is_reached(SocketConfig(host="::", advertise="127.0.0.1"))


async def test_a_peer_that_is_not_there_is_named() -> None:
    reader = SocketConnector(Pool().regions, 2, SECRET, SocketConfig())
    holder = SocketConnector(Pool().regions, 1, SECRET, SocketConfig())
    metadata = holder.metadata()
    await holder.close()
    with pytest.raises(TransferError, match="127.0.0.1:"):
        await reader.connect(1, metadata)
    await reader.close()


def test_an_address_that_cannot_be_listened_at_is_named() -> None:
    with pytest.raises(ConnectorUnavailable, match="192.0.2.1"):
        SocketConnector(Pool().regions, 2, SECRET, SocketConfig(host="192.0.2.1"))


def test_an_address_that_means_any_has_to_be_told_to_peers() -> None:
    with pytest.raises(ConnectorUnavailable, match="advertise"):
        SocketConnector(Pool().regions, 2, SECRET, SocketConfig(host="0.0.0.0"))


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("none")
    with pytest.raises(ConnectorUnavailable, match="TLS"):
        SocketTls.load(str(tmp_path / "key"), str(tmp_path / "key"), None)
