"""A host at the other end of a cable to this machine, and what it reaches here. Needs root.

The machine gets a route to the host and one to itself by an address of its own for that, but no
interface gets an address: whatever starts meanwhile would take it for one of the machine's. Both
routes end with the cable, and the cable with the host.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.e2e.hosts import ROOT, Host

_NETWORK = "198.19"  # for tests between networks, by RFC 2544; hosts.py has the other half
_CONNECT_S = 5.0


def why_none() -> str:
    """Empty where there can be one."""
    command = ["sh", "-c", "command -v nsenter setpriv >/dev/null && unshare --net ip link"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    needs = "a network of another host's takes root, ip, nsenter, setpriv and unshare"
    return f"{needs}: {done.stdout}" if done.returncode else ""


class Neighbour(NamedTuple):
    host: Host
    address: str  # of this machine, at the cable

    def reached(self, ports: Collection[int]) -> set[int]:
        """Those that take a connection at any address of this machine; at the others it must be
        refused."""
        found = json.loads(_said("ip", "-json", "-4", "address", "show", "scope", "global"))
        addresses = [self.address, *(one["local"] for link in found for one in link["addr_info"])]
        order = json.dumps([addresses, sorted(ports)])
        inside = self._inside(sys.executable, "-m", "tests.e2e.neighbour", order)
        return set(json.loads(_said(*inside)))

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._inside(*command), stdout=subprocess.PIPE)

    def unplug(self) -> None:
        """Nobody is told: what it sends or is sent is lost."""
        self.host.run("ip", "link", "set", "eth0", "down")

    def _inside(self, *command: str) -> list[str]:
        """From its network alone: files under /tmp, where this may be, are its own."""
        return ["nsenter", "-t", str(self.host.pid), "--net", f"--wd={ROOT}", *command]


@contextmanager
def neighbour() -> Iterator[Neighbour]:
    number = 4 * secrets.randbelow(1 << 14)
    cable = f"kvrelay{number}"  # which can be there only once, and so the addresses
    ours, theirs = (f"{_NETWORK}.{one // 256}.{one % 256}" for one in (number + 1, number + 2))
    host = Host("neighbour")
    try:
        end = ["peer", "name", "eth0", "netns", str(host.pid)]
        _said("ip", "link", "add", cable, "type", "veth", *end)
        _said("ip", "link", "set", cable, "addrgenmode", "none", "up")
        _said("ip", "route", "add", "local", ours, "dev", cable)
        _said("ip", "route", "add", theirs, "dev", cable)
        host.run("ip", "address", "add", f"{theirs}/30", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "route", "add", "default", "via", ours)
        yield Neighbour(host, ours)
    finally:
        host.close()


def _said(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _takes(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    return True


def main() -> None:
    addresses, ports = json.loads(sys.argv[1])
    reached = {port for address in addresses for port in ports if _takes(address, port)}
    sys.stdout.write(json.dumps(sorted(reached)))


if __name__ == "__main__":
    main()
