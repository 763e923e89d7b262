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
_RANGES = range(10000, 20000)
_TRIES = 64
_MARK_BYTES = 100  # of a name of Linux's, in which there is room for a few more


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


@contextmanager
def reserved(address: Address, field: str) -> Iterator[None]:
    """PlaneError where another process of this machine has it in mind, though nobody listens there
    yet. HAProxy and gRPC would share a port (SO_REUSEPORT), each with its part of the callers."""
    with socket.socket(socket.AF_UNIX) as mark:  # which has no file, and goes with its process
        try:
            mark.bind(f"\0kvrelay-port-{address.port}-{address.host}".encode()[:_MARK_BYTES])
        except OSError as error:
            message = f"{address} is about to be listened on by another process"
            raise PlaneError(field, message) from error
        yield


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """For a process that will listen while the block runs. Not one of those that the system gives
    out by itself: it could give it to somebody's outgoing connection meanwhile."""
    _resolve(Address(host, 0), "port")
    with contextlib.ExitStack() as stack:
        for last in range(_TRIES - 1, -1, -1):
            address = Address(host, random.choice(_UNASKED))
            try:
                with claimed(address, "port"):
                    stack.enter_context(reserved(address, "port"))
                break
            except PlaneError:
                if not last:
                    raise
        yield address.port


@contextmanager
def reserved_range(num_ports: int) -> Iterator[range]:
    """For processes that will listen while the block runs, and would share a port with strangers
    without noticing. Others that reserve as many at a time get other ones."""
    firsts = range(_RANGES.start, _RANGES.stop - num_ports + 1, num_ports)
    with contextlib.ExitStack() as stack:
        for first in random.sample(firsts, len(firsts)):
            with contextlib.suppress(PlaneError):
                stack.enter_context(reserved(Address("*", first), "port"))
                break
        else:
            raise PlaneError("port", f"all of {_RANGES.start} to {_RANGES.stop} are spoken for")
        yield range(first, first + num_ports)


def _resolve(address: Address, field: str) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise PlaneError(field, f"{address}: {error.strerror}") from error
    return [(family, (str(place[0]), int(place[1]))) for family, _, _, _, place in found]
