"""Which ports the processes of a host listen on, and what each says to a stranger elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tests.e2e.hosts import Host

_CURL = ("curl", "-s", "-m", "2", "-o", "/dev/null", "-w", "%{http_code}")
_LINE = re.compile(r'^LISTEN +\d+ +\d+ +(\S+):(\d+) .*\(\("([^"]+)"', re.MULTILINE)


class Port(NamedTuple):
    address: str
    number: int
    process: str

    @property
    def is_loopback(self) -> bool:
        return "127." in self.address or self.address == "[::1]"


def ports(host: Host) -> list[Port]:
    found = _LINE.findall(host.run("ss", "-ltnp"))
    return sorted({Port(address, int(number), process) for address, number, process in found})


def show_ports(
    hosts: Sequence[Host], addresses: Sequence[str], stranger: Host | None = None
) -> str:
    """A table. `to a stranger`: what HTTP without a token or a key gets from another host, one of
    them if no other is named."""
    lines = ["| host | address | process | to a stranger |", "| --- | --- | --- | --- |"]
    for host, address in zip(hosts, addresses, strict=True):
        elsewhere = stranger or next(one for one in hosts if one is not host)
        for port in ports(host):
            said = ask(elsewhere, address, port.number)
            place = f"{port.address}:{port.number}"
            lines.append(f"| {host.name} | {place} | {port.process} | {said} |")
    return "\n".join(lines)


def ask(stranger: Host, address: str, number: int) -> str:
    """The first path that is answered with a status, or what became of the connection."""
    said = ""
    for path in ("/metrics", "/stats", "/", "/v1/models"):
        url = f"http://{address}:{number}{path}"
        said = stranger.run("sh", "-c", '"$@"; echo " $?"', "-", *_CURL, url)
        status, code = said.split()
        if code == "7":
            return "refused"
        if status == "200":
            return f"200 at {path}"
    return "no HTTP" if status == "000" else status
