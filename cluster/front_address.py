"""Where a front listens, and whether it can."""

from __future__ import annotations

import errno
import socket
from typing import NamedTuple

from cluster.open_files import ENABLED
from engine.errors import ConfigError

LOOPBACK, HTTP_PORT = "127.0.0.1", 8000  # unless asked for another
# Every address, of IPv6 too: for :: Serve has HAProxy listen on IPv4 alone, this it passes on.
EVERYWHERE = "::0"
_CONNECT_S = 5.0


class FrontAddress(NamedTuple):
    """On every node that has a front. `grpc_port`: None where our service is not on it."""

    host: str
    port: int
    grpc_port: int | None = None

    @property
    def url(self) -> str:
        return front_url(self.host, self.port)


def front_url(host: str, port: int) -> str:
    """How it is reached from this machine."""
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]", EVERYWHERE: "[::1]"}
    shown = here.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/v1"


def listen(host: str, port: int) -> socket.socket:
    """Bound and not listening yet: clients are refused until the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once, without waiting for more, where it knows a connection for one of TCP.
    try:
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:  # of a kernel without IPv6
        raise ConfigError("host", f"{host} is no address here: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OverflowError as error:
        listener.close()
        raise ConfigError("port", f"{port}, must be in 0..65535") from error
    except TypeError as error:  # of letters that no host's name has
        listener.close()
        raise ConfigError("host", f"{host!r} is no address here: {error}") from error
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("host", f"{host} is no address here: {error.strerror}") from error
        raise ConfigError("port", f"{port} on {host}: {error.strerror}") from error
    return listener


def check_reached(host: str) -> None:
    """ConfigError where Serve's HAProxy would answer 500 to everything, as it finds no ingress: it
    asks for those of its node at the loopback, and they listen where it does, at `host`."""
    from ray._raylet import get_localhost_ip  # type: ignore[attr-defined]  # loads Ray

    asked = get_localhost_ip()
    with listen(host, 0) as listener:
        listener.listen()
        try:
            socket.create_connection((asked, listener.getsockname()[1]), _CONNECT_S).close()
        except OSError as error:
            raise ConfigError(
                "host",
                f"{host}, where Serve's HAProxy does not reach the ingresses, which it asks at"
                f" {asked}: may be 0.0.0.0 or ::, with a firewall; or {asked}, with a proxy of"
                f" yours that listens at {host}; {ENABLED}=0 in Ray's environment has Serve's"
                " Python proxy listen there, which is slower",
            ) from error
