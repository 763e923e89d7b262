"""A thread with one connection to a peer, which receives blobs into our pool."""

import contextlib
import logging
import select
import socket
import threading
import time
from dataclasses import dataclass, field

from kv_transfer import socket_wire as wire
from kv_transfer.block_pairs import BlockPairs
from kv_transfer.carrier import CarriedPool, Carrier, End
from kv_transfer.errors import LinkLost, TransferError
from kv_transfer.faults import BREAK, POSTED, READ, Faults
from kv_transfer.piece_read import Backlog, PieceRead
from kv_transfer.socket_server import set_options
from kv_transfer.socket_tls import SocketTls

logger = logging.getLogger(__name__)

_LEAST_S = 0.1  # for an address to answer


@dataclass(frozen=True, slots=True)
class Target:
    """Where a peer's server listens, and how it is greeted."""

    host: str
    port: int
    incarnation: int
    secret: bytes
    tls: SocketTls | None
    answer_s: float  # from the name's look-up to the greeting's end
    stall_s: float
    faults: Faults = field(default_factory=Faults)


class Stream:
    """Takes pieces from the peer's backlog until that is closed; connects when it has to.

    A connection carries one piece at a time, so that cutting it ends that piece and no other.
    """

    def __init__(self, target: Target, pool: CarriedPool, backlog: Backlog[BlockPairs]) -> None:
        self._target = target
        self._pool = pool
        self._backlog = backlog
        self._lock = threading.Lock()
        self._read: PieceRead[BlockPairs] | None = None  # whose piece is under way
        self._sock: socket.socket | None = None
        self._carrier: Carrier | None = None  # once the connection is greeted
        self._cut = False
        self._thread = threading.Thread(target=self._run, name="socket-stream", daemon=True)
        self._thread.start()

    def interrupt(self, read: PieceRead[BlockPairs] | None) -> None:
        """Closes the connection if it carries a piece of this read, or of any for None."""
        with self._lock:
            if self._read and (read is None or self._read is read):
                self._cut = True
                _shut(self._sock)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while found := self._backlog.wait():
            read, pairs = found
            with self._lock:
                self._read = read
            error = self._carry_out(read, pairs)
            with self._lock:
                self._read = None
                broken = self._cut or error is not None
                self._cut = False
            if broken:
                self._hang_up()
            read.finish(error)
        self._hang_up()

    def _carry_out(self, read: PieceRead[BlockPairs], pairs: BlockPairs) -> TransferError | None:
        """The error, if there was one; either way nothing is written any more."""
        try:
            sock, carrier = self._connected(read)
            sock.sendall(wire.pack_request(pairs.group, pairs.remote.astype("<u4").tobytes()))
            if self._target.faults.reach(READ) == BREAK:
                raise ConnectionError("a fault was asked for")
            wire.check(wire.receive_answer(sock))
            self._target.faults.reach(POSTED)
            carrier.receive(pairs.group, pairs.local, lambda: read.stopped)
        except TransferError as e:
            return e
        except OSError as e:
            return LinkLost(f"the connection to {self._where} broke: {e}")
        except Exception as e:  # a library's, out of memory: whoever waits is told
            logger.exception("reading from %s failed", self._where)
            return LinkLost(f"reading from {self._where} failed: {e!r}")
        return None

    @property
    def _where(self) -> str:
        return f"{self._target.host}:{self._target.port}"

    def _connected(self, read: PieceRead[BlockPairs]) -> tuple[socket.socket, Carrier]:
        if self._sock and _has_input(self._sock):
            self._hang_up()  # nothing was asked, so this is its end
        if self._sock and self._carrier:
            self._check_wanted(read)
            return self._sock, self._carrier
        target = self._target
        deadline = time.monotonic() + target.answer_s
        sock = self._dialled(read, deadline)
        set_options(sock)
        if target.tls:
            # To Python a socket's time is for a TLS handshake as a whole, and not for each receive.
            sock.settimeout(max(_LEAST_S, deadline - time.monotonic()))
            wrapped = target.tls.client.wrap_socket(
                sock,
                server_hostname=target.tls.server_name or target.host,
                do_handshake_on_connect=False,
            )
            self._keep(wrapped, read)
            wrapped.do_handshake()
            sock = wrapped
        wire.greet_server(sock, target.secret, target.incarnation, deadline)
        self._carrier = self._pool.carry(sock, End.READER)
        sock.settimeout(target.stall_s)
        return sock, self._carrier

    def _dialled(self, read: PieceRead[BlockPairs], deadline: float) -> socket.socket:
        """To the first of the host's addresses that takes it; each has its share of the time."""
        host, port = self._target.host.encode(), self._target.port
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        failure = OSError("it has no address")
        for number, (family, kind, protocol, _, address) in enumerate(addresses):
            sock = self._keep(socket.socket(family, kind, protocol), read)
            share_s = (deadline - time.monotonic()) / (len(addresses) - number)
            sock.settimeout(max(_LEAST_S, share_s))
            try:
                sock.connect(address)
            except OSError as error:
                failure = error
                self._hang_up()
            else:
                return sock
        raise failure

    def _keep(self, sock: socket.socket, read: PieceRead[BlockPairs]) -> socket.socket:
        with self._lock:
            self._sock = sock
        self._check_wanted(read)
        return sock

    def _check_wanted(self, read: PieceRead[BlockPairs]) -> None:
        """After the socket is known to `interrupt`, so that one of the two sees the other."""
        if read.stopped:
            raise TransferError("not wanted any more")

    def _hang_up(self) -> None:
        with self._lock:
            sock, self._sock = self._sock, None
        carrier, self._carrier = self._carrier, None
        if carrier:
            carrier.close()
        if sock:
            sock.close()


def _shut(sock: socket.socket | None) -> None:
    """Wakes the thread that uses the socket; past TLS, whose own shutdown is not for two."""
    if sock:
        with contextlib.suppress(OSError):  # not connected yet, or not any more
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _has_input(sock: socket.socket) -> bool:
    poll = select.poll()  # select.select knows no descriptor above 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
