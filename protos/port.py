"""Whether a port can be had, known before anything that takes long."""

import contextlib
import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from protos.address import Address
from protos.errors import PlaneError

# Below what Linux gives out, and below the ports of Serve's replicas.
_UNASKED = range(20000, 30000)
_TRIES = 64


@contextmanager
def claimed(address: Address, field: str) -> Iterator[None]:
    """PlaneError where nobody could listen there now. Meanwhile the port is bound and not
    listened at, which keeps callers away and does not hinder whoever comes to listen."""
    with contextlib.ExitStack() as stack:
        problems = []
        for family, address_of_family in _resolve(address, field):
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address_of_family)
            except OSError as error:
                problems.append(error)
            else:
                break
        else:
            taken = [error for error in problems if error.errno == errno.EADDRINUSE]
            worst = (taken or problems)[0]
            raise PlaneError(field, f"{address} cannot be listened on: {worst.strerror}")
        yield


def free_port(host: str) -> int:
    """For a process that will listen later. Not one of those that the system gives out by itself:
    it could give it to somebody's outgoing connection meanwhile."""
    _resolve(Address(host, 0), "port")
    for last in range(_TRIES - 1, -1, -1):
        port = random.choice(_UNASKED)
        try:
            with claimed(Address(host, port), "port"):
                break
        except PlaneError:
            if not last:
                raise
    return port


def _resolve(address: Address, field: str) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise PlaneError(field, f"{address}: {error.strerror}") from error
    return [(family, (str(place[0]), int(place[1]))) for family, _, _, _, place in found]
