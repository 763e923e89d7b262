"""Lets peers read our pool over TCP: a thread for each of their connections."""

import contextlib
import errno
import logging
import math
import os
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass

import numpy as np

from kv_transfer import socket_wire as wire
from kv_transfer.block_pairs import Blocks
from kv_transfer.carrier import CarriedPool, Carrier, End
from kv_transfer.errors import TransferError

logger = logging.getLogger(__name__)

_SWEEP_S = 0.5
_TOLD_S = 60.0  # from one word in the log to the next, of what fails all the time


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """`max_connections`: of peers, and as many of those who have not shown that they are any;
    `answer_s`: for a handshake as a whole, and for a request once it has begun;
    `stall_s`: without a byte taken by the reader. Idle connections may stay.
    """

    max_connections: int = 256
    answer_s: float = 5.0
    stall_s: float = 30.0


class _Connection:
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.is_peer = False  # it knows the secret, and is served
        self.deadline: float | None = deadline  # of what it has to say now
        self.thread: threading.Thread | None = None

    def cut(self) -> None:
        """Ends whatever its thread does with the socket; for any thread."""
        with contextlib.suppress(OSError):  # not connected any more
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class SocketServer:
    """Listens until closed. No reader can stop it, nor keep a thread without taking bytes.

    Whoever is not a peer yet takes no peer's place, and goes when there are too many: the oldest.
    """

    def __init__(
        self,
        pool: CarriedPool,
        incarnation: int,
        secret: bytes,
        address: tuple[str, int],
        tls: ssl.SSLContext | None,
        limits: ServerLimits,
    ) -> None:
        self._pool = pool
        self._incarnation = incarnation
        self._secret = secret
        self._tls = tls
        self._limits = limits
        self._lock = threading.Lock()
        self._connections: dict[_Connection, None] = {}  # in the order in which they came
        self._closing = False
        self._told_at = -math.inf
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        both = address[0] == "::" and socket.has_dualstack_ipv6()  # as gRPC's servers listen
        self._listener = socket.create_server(
            address, family=family, backlog=128, dualstack_ipv6=both
        )
        self._listener.settimeout(_SWEEP_S)
        self._thread = threading.Thread(target=self._accept, name="socket-accept", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def is_dead(self) -> bool:
        """It listens no more, and nobody has closed it."""
        return not self._closing and not self._thread.is_alive()

    def close(self) -> None:
        """Returns when no thread touches the pool any more."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._thread.join()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            while connection.thread and connection.thread.is_alive():
                connection.cut()  # again, where it had just exchanged its socket for TLS
                connection.thread.join(_SWEEP_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            self._sweep()
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # of that one connection, or no descriptors left
                self._tell(error)
                time.sleep(0.01)
                continue
            while (oldest := self._cut_oldest_stranger()) and oldest.thread:
                oldest.thread.join(_SWEEP_S)
            self._start(sock)

    def _tell(self, error: OSError) -> None:
        now = time.monotonic()
        if self._closing or now < self._told_at + _TOLD_S:
            return
        self._told_at = now
        lacks_files = error.errno in (errno.EMFILE, errno.ENFILE)
        advice = "; raise the limit of open files (ulimit -n)" if lacks_files else ""
        words = os.strerror(error.errno) if error.errno else str(error)
        logger.error("no peer can connect to read from here: %s%s", words, advice)

    def _cut_oldest_stranger(self) -> _Connection | None:
        """None while there is room for one more."""
        with self._lock:
            strangers = [c for c in self._connections if not c.is_peer]
            if len(strangers) < self._limits.max_connections:
                return None
            strangers[0].cut()
            return strangers[0]

    def _admit(self, connection: _Connection) -> bool:
        """It knows the secret; False if as many are served already."""
        with self._lock:
            num_peers = sum(c.is_peer for c in self._connections)
            connection.is_peer = num_peers < self._limits.max_connections
        return connection.is_peer

    def _start(self, sock: socket.socket) -> None:
        connection = _Connection(sock, time.monotonic() + self._limits.answer_s)
        connection.thread = threading.Thread(
            target=self._serve, args=(connection,), name="socket-serve", daemon=True
        )
        with self._lock:
            self._connections[connection] = None
        try:
            connection.thread.start()
        except RuntimeError:  # no thread is left: nothing for those who are served already
            with self._lock:
                self._connections.pop(connection, None)
            sock.close()

    def _sweep(self) -> None:
        """Cuts who lets us wait for what it has begun to say."""
        now = time.monotonic()
        with self._lock:
            late = [c for c in self._connections if c.deadline is not None and c.deadline < now]
        for connection in late:
            connection.cut()

    def _serve(self, connection: _Connection) -> None:
        try:
            self._talk(connection)
        except (OSError, TransferError):  # the end of this connection, and of no other
            _reset(connection.sock)
        finally:
            connection.sock.close()
            with self._lock:
                self._connections.pop(connection, None)

    def _talk(self, connection: _Connection) -> None:
        set_options(connection.sock)
        connection.sock.settimeout(self._limits.stall_s)
        if self._tls:
            connection.sock = self._tls.wrap_socket(
                connection.sock, server_side=True, do_handshake_on_connect=False
            )
            assert isinstance(connection.sock, ssl.SSLSocket)
            connection.sock.do_handshake()
        deadline = time.monotonic() + self._limits.answer_s
        if not wire.greet_reader(
            connection.sock,
            self._secret,
            self._incarnation,
            deadline,
            lambda: self._admit(connection),
        ):
            return
        carrier = self._pool.carry(connection.sock, End.HOLDER)
        try:
            while self._answer(connection, carrier):
                pass
        finally:
            carrier.close()

    def _answer(self, connection: _Connection, carrier: Carrier) -> bool:
        """One request; False if it was none that can be answered."""
        sock = connection.sock
        connection.deadline = None
        sock.settimeout(None)
        request = wire.receive_request(sock)
        connection.deadline = time.monotonic() + self._limits.answer_s
        sock.settimeout(self._limits.stall_s)
        blocks = self._asked(sock, request)
        connection.deadline = None
        if blocks is None:
            wire.send_answer(sock, wire.Answer.BAD_REQUEST)
            return False
        wire.send_answer(sock, wire.Answer.OK)
        carrier.send(request.group, blocks)
        return True

    def _asked(self, sock: socket.socket, request: wire.Request) -> Blocks | None:
        """None if the request names what is not there."""
        if request.group >= len(self._pool.regions):
            return None
        if request.num_blocks > wire.MAX_REQUEST_BLOCKS:
            return None
        data = wire.receive(sock, request.num_blocks * wire.REQUEST_BLOCK_BYTES)
        blocks = np.frombuffer(data, "<u4")
        if len(blocks) and int(blocks.max()) >= self._pool.regions[request.group].num_blocks:
            return None
        return blocks.astype(np.int32)


def set_options(sock: socket.socket) -> None:
    """A host that is gone is noticed within half a minute, on an idle connection too."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _reset(sock: socket.socket) -> None:
    """What was not taken is thrown away by the close, and the reader learns it at once."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
