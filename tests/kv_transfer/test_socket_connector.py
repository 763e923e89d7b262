"""What a socket connector does with its own threads."""

import asyncio
import socket
import struct
import threading

import pytest

from kv_transfer.block_pairs import BlockPairs
from kv_transfer.errors import TransferError
from kv_transfer.piece_read import Backlog, PieceRead
from kv_transfer.pool_description import PoolDescription
from kv_transfer.socket_connector import SocketConfig, SocketConnector
from kv_transfer.socket_server import ServerLimits
from kv_transfer.socket_stream import Stream
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
