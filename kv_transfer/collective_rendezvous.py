"""What two ends of a communicator tell each other over its control connection, and who is there.

    both         nonce, and what they mean to make                                  (control)
    both         whatever their library needs to find the other, by name            (control)
    reader  ->   proof for the two nonces, then holder -> reader               (communicator)

The control connection is greeted before, so its other end knows the cluster's secret. Of whom a
library has connected to, only the proofs tell.
"""

import contextlib
import hmac
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable

from kv_transfer import socket_wire as wire
from kv_transfer.carrier import End
from kv_transfer.errors import IncompatiblePeer

PROOF_BYTES = 32
_NONCE_BYTES = 32
_LENGTHS = struct.Struct("<HH")
_MAX_BYTES = 4096  # of a value; Gloo's addresses have some 200
_MAX_VALUES = 64


class Rendezvous:
    """Small values by name, each told once by one of the two ends. Used by one thread."""

    def __init__(self, sock: socket.socket, end: End, deadline: float) -> None:
        self._sock = sock
        self._end = end
        self._deadline = deadline
        self._values: dict[str, bytes] = {}

    def put(self, name: str, value: bytes) -> None:
        self._values[name] = value
        encoded = name.encode()
        self._sock.sendall(_LENGTHS.pack(len(encoded), len(value)) + encoded + value)

    def get(self, name: str) -> bytes:
        """As soon as it was told."""
        while name not in self._values:
            if len(self._values) >= _MAX_VALUES:
                raise ConnectionError("the peer tells what nobody asks for")
            name_bytes, num_bytes = _LENGTHS.unpack(self._receive(_LENGTHS.size))
            if max(name_bytes, num_bytes) > _MAX_BYTES:
                raise ConnectionError(f"the peer tells {num_bytes} bytes at once")
            told = self._receive(name_bytes).decode(errors="replace")
            self._values[told] = self._receive(num_bytes)
        return self._values[name]

    def agree(self, plan: str) -> bytes:
        """What both ends mean to make must be the same; the answer is the session's nonces."""
        other = End(1 - self._end)
        self.put(f"{self._end.name} plan", plan.encode())
        self.put(f"{self._end.name} nonce", secrets.token_bytes(_NONCE_BYTES))
        theirs = self.get(f"{other.name} plan")
        if theirs != plan.encode():
            raise IncompatiblePeer("communicator", f"{theirs!r}, ours is {plan!r}")
        nonces = [self.get(f"{end.name} nonce") for end in End]
        if any(len(nonce) != _NONCE_BYTES for nonce in nonces):
            raise ConnectionError("the peer's nonce is none")
        return b"".join(nonces)

    def _receive(self, num_bytes: int) -> bytes:
        return wire.receive(self._sock, num_bytes, self._deadline)


def proof(secret: bytes, end: End, nonces: bytes) -> bytes:
    said = b"kvrelay collective %b " % end.name.encode() + nonces
    return hmac.digest(secret, said, "sha256")


class Lifeline:
    """Calls `interrupt` when the control connection ends, whoever ends it: nothing else wakes a
    thread that waits for a communicator.
    """

    def __init__(self, sock: socket.socket, interrupt: Callable[[], None]) -> None:
        self._sock = sock
        self._interrupt = interrupt
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="collective-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _watch(self) -> None:
        poll = select.poll()  # select.select knows no descriptor above 1023
        poll.register(self._sock, select.POLLRDHUP)
        poll.poll()
        if not self._closed:
            self._interrupt()
