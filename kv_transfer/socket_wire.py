"""What two ends of a transfer socket say to each other.

    reader                                              server
      Hello: version, incarnation meant, nonce     ->
                                                   <-     nonce, proof
      proof                                        ->
                                                   <-     answer
      request: group, blocks                       ->
                                                   <-     answer, then the blobs, in that order
      ...

A proof shows that its sender knows the cluster's secret, without telling it.
"""

import enum
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from kv_transfer.errors import IncompatiblePeer, TransferError

VERSION = 1
MAX_REQUEST_BLOCKS = 1 << 16

_MAGIC = b"KVRS"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HELLO = struct.Struct(f"<4sHQ{_NONCE_BYTES}s")
_REQUEST = struct.Struct("<HI")  # group, number of blocks; each is a uint32 that follows
REQUEST_BLOCK_BYTES = 4


class Answer(enum.IntEnum):
    """What the server says first; after any but OK it closes the socket."""

    OK = 0
    WRONG_VERSION = 1
    WRONG_SECRET = 2
    WRONG_INCARNATION = 3
    BAD_REQUEST = 4
    BUSY = 5


class Request(NamedTuple):
    group: int
    num_blocks: int


def greet_server(sock: socket.socket, secret: bytes, incarnation: int, deadline: float) -> None:
    """The reader's part of the handshake."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(_HELLO.pack(_MAGIC, VERSION, incarnation, ours))
    theirs = receive(sock, _NONCE_BYTES, deadline)
    proof = receive(sock, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"server", incarnation, ours, theirs)):
        raise TransferError("the peer does not have this cluster's secret", retryable=False)
    sock.sendall(_proof(secret, b"reader", incarnation, ours, theirs))
    check(receive_answer(sock, deadline))


def greet_reader(
    sock: socket.socket,
    secret: bytes,
    incarnation: int,
    deadline: float,
    admit: Callable[[], bool],
) -> bool:
    """The server's part; False if this is no reader of ours, or is not admitted."""
    magic, version, meant, theirs = _HELLO.unpack(receive(sock, _HELLO.size, deadline))
    if magic != _MAGIC:
        return False
    ours = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(ours + _proof(secret, b"server", meant, theirs, ours))
    proof = receive(sock, _PROOF_BYTES, deadline)
    answer = Answer.OK
    if not hmac.compare_digest(proof, _proof(secret, b"reader", meant, theirs, ours)):
        answer = Answer.WRONG_SECRET
    elif version != VERSION:
        answer = Answer.WRONG_VERSION
    elif meant != incarnation:
        answer = Answer.WRONG_INCARNATION
    elif not admit():
        answer = Answer.BUSY
    send_answer(sock, answer)
    return answer is Answer.OK


def pack_request(group: int, blocks: bytes) -> bytes:
    """`blocks`: one uint32 each, little-endian."""
    return _REQUEST.pack(group, len(blocks) // REQUEST_BLOCK_BYTES) + blocks


def receive_request(sock: socket.socket) -> Request:
    return Request(*_REQUEST.unpack(receive(sock, _REQUEST.size)))


def send_answer(sock: socket.socket, answer: Answer) -> None:
    sock.sendall(bytes([answer]))


def receive_answer(sock: socket.socket, deadline: float | None = None) -> Answer:
    value = receive(sock, 1, deadline)[0]
    try:
        return Answer(value)
    except ValueError as e:
        raise TransferError(f"the peer answered {value}") from e


def check(answer: Answer) -> None:
    match answer:
        case Answer.OK:
            return
        case Answer.WRONG_VERSION:
            raise IncompatiblePeer("version", f"the peer does not speak {VERSION}")
        case Answer.WRONG_SECRET:
            raise TransferError("the peer has another secret", retryable=False)
        case Answer.WRONG_INCARNATION:
            raise IncompatiblePeer("incarnation", "another process listens at the address")
        case Answer.BAD_REQUEST:
            raise TransferError("the peer refused the request", retryable=False)
        case Answer.BUSY:
            raise TransferError("the peer has as many connections as it serves at once")


def receive(sock: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """Exactly so many bytes; the deadline is one of `time.monotonic`, for all of them."""
    data = b""
    while len(data) < num_bytes:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the peer is too slow")
            sock.settimeout(left)
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return data


def _proof(secret: bytes, role: bytes, incarnation: int, reader: bytes, server: bytes) -> bytes:
    said = b"kvrelay socket %b %d " % (role, incarnation) + reader + server
    return hmac.digest(secret, said, "sha256")
