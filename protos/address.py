"""Where a worker listens: HOST:PORT, an IPv6 host in brackets."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

from protos.errors import PlaneError

# Of parts between dots as long as names of hosts may have them, or looking one up fails.
_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)(?!.*\.\.)(?!.*[^.]{64})[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?\Z"
)
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """Checked when made from text: what a peer or a user names is input like any other."""

    host: str  # an IPv6 host without its brackets
    port: int

    @classmethod
    def parse(cls, text: str, field: str = "address") -> Self:
        host, colon, port = text.rpartition(":")
        if not colon or not (port.isascii() and port.isdigit()) or len(port) > 5:
            raise PlaneError(field, f"{_shown(text)}, must be HOST:PORT")
        if int(port) > MAX_PORT:
            raise PlaneError(field, f"{_shown(text)}, the port must be in 0..{MAX_PORT}")
        bracketed = host.startswith("[") and host.endswith("]")
        bare = host[1:-1] if bracketed else host
        if not (_is_ipv6(bare) if bracketed else _is_host(bare)):
            raise PlaneError(field, f"{_shown(text)}, must be HOST:PORT, IPv6 as [HOST]:PORT")
        return cls(bare, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; other names may mean anything."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return "%" not in host


def _is_host(host: str) -> bool:
    """Numbers and dots alone are an IPv4 address, or nothing."""
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return False
    return bool(_HOST_NAME.match(host))
