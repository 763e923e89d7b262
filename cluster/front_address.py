"""Where Serve's front listens."""

from __future__ import annotations

from typing import NamedTuple

LOOPBACK, HTTP_PORT = "127.0.0.1", 8000  # unless asked for another


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
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/v1"
