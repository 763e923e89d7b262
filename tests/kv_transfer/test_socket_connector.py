"""What a socket connector does with its own threads."""

import asyncio
import socket
import ssl
import struct
import threading
from contextlib import suppress
from typing import Any

import pytest

from kv_transfer.block_pairs import BlockPairs
from kv_transfer.errors import TransferError
from kv_transfer.piece_read import Backlog, PieceRead
from kv_transfer.pool_description import PoolDescription
from kv_transfer.socket_connector import SocketConfig, SocketConnector
from kv_transfer.socket_server import ServerLimits
from kv_transfer.socket_stream import Stream
from kv_transfer.socket_tls import SocketTls
from tests.kv_transfer.pools import Pool
from tests.waiting import until

SECRET = b"cluster"
PATIENT = SocketConfig(limits=ServerLimits(answer_s=60.0, stall_s=60.0))
Found = tuple[PieceRead[BlockPairs], BlockPairs] | None


async def test_closing_reaches_a_stream_that_had_just_taken_a_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose peer takes the connection and says nothing: it would wait for an answer."""
    taken, interrupted = threading.Event(), threading.Event()
    wait, interrupt = Backlog.wait, Stream.interrupt

    def wait_and_dawdle(backlog: Backlog[BlockPairs]) -> Found:
        found = wait(backlog)
        if found:
            taken.set()
            assert interrupted.wait(30)
        return found

    def note(stream: Stream, read: PieceRead[BlockPairs] | None) -> None:
        interrupt(stream, read)
        interrupted.set()

    monkeypatch.setattr(Backlog, "wait", wait_and_dawdle)
    monkeypatch.setattr(Stream, "interrupt", note)
    pool = Pool()
    reader = SocketConnector(pool.regions, 2, SECRET, PATIENT)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        payload = struct.pack("<H", silent.getsockname()[1]) + b"127.0.0.1"
        metadata = PoolDescription("socket", 1, tuple(pool.regions), payload).encode(SECRET)
        connecting = asyncio.ensure_future(reader.connect(1, metadata))
        assert await asyncio.to_thread(taken.wait, 30)
        await until(lambda: not reader._backlogs[0]._reads)  # the other one has looked, too
        await asyncio.wait_for(reader.close(), 10)
    with pytest.raises(TransferError):
        await connecting


class Noting(ssl.SSLContext):
    """What a handshake's time is."""

    times_s: list[float | None]

    def wrap_socket(self, sock: socket.socket, *arguments: Any, **named: Any) -> ssl.SSLSocket:
        self.times_s.append(sock.gettimeout())
        return super().wrap_socket(sock, *arguments, **named)


async def test_a_tls_handshake_that_drips_has_what_the_dial_left_of_its_time() -> None:
    client = Noting(ssl.PROTOCOL_TLS_CLIENT)
    client.times_s = []
    answer_s = 1.0
    tls = SocketTls(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), client)
    config = SocketConfig(tls=tls, streams=1, limits=ServerLimits(answer_s=answer_s))
    pool = Pool()
    reader = SocketConnector(pool.regions, 2, SECRET, config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        payload = struct.pack("<H", listening.getsockname()[1]) + b"127.0.0.1"
        metadata = PoolDescription("socket", 1, tuple(pool.regions), payload).encode(SECRET)
        dripping = asyncio.create_task(asyncio.to_thread(drip, listening))
        with pytest.raises(TransferError, match="timed out"):
            await asyncio.wait_for(reader.connect(1, metadata), 30)
        await reader.close()
        await asyncio.wait_for(dripping, 30)
    (time_s,) = client.times_s
    assert time_s is not None
    assert time_s < answer_s, "some of it has passed"


def drip(listening: socket.socket) -> None:
    """The beginning of a server's greeting, one byte in each tenth of a second."""
    sock, _ = listening.accept()
    with sock, suppress(OSError):
        sock.sendall(struct.pack(">BHHB", 22, 0x303, 1 << 14, 2))
        sock.settimeout(0.1)
        while True:
            with suppress(TimeoutError):
                if not sock.recv(1 << 16):
                    return
            sock.sendall(b"\0")
