"""A Ray cluster of others': who joins it learns whether its head is there."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster import joined_ray
from cluster.commands.serve_stop import stop_signals
from cluster.joined_ray import ReachWatch, init_ray, joined
from cluster.ray_cluster import ray_cluster
from engine.errors import ConfigError, UnavailableError
from protos.port import reserved_port
from tests.processes import ROOT

SAID_S = 30.0


def test_a_head_that_is_away_is_told_and_that_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_ray, "_REACH_S", 0.01)
    said: queue.Queue[str] = queue.Queue()
    with reserved_port("127.0.0.1") as port:
        place = ("127.0.0.1", port)
        address = f"127.0.0.1:{port}"
        with socket.create_server(place):
            watch = ReachWatch(address, said.put)
        try:
            away = f"no Ray cluster answers at {address}: [Errno 111] Connection refused; if its"
            assert said.get(timeout=SAID_S).startswith(away)
            with socket.create_server(place):
                assert said.get(timeout=SAID_S) == f"the Ray cluster at {address} answers again"
                watch.stop()  # or it may see this head go, too
        finally:
            watch.stop()
    assert said.empty()


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_where_no_head_is_nobody_waits_for_it(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray, "init")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"no Ray cluster answers at {address}"):
            joined(address).__enter__()


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.example"])
def test_what_is_no_host_is_named(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray, "init")
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS: {host}:6379, must be"):
        joined(f"{host}:6379").__enter__()


def test_who_is_no_head_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would ask twenty times, and wait for each answer."""
    asked: list[str] = []

    def client(address: str, **_: object) -> None:
        asked.append(address)
        raise RuntimeError("it does not answer")

    monkeypatch.setattr("ray._private.node.GcsClient", client)
    before = dict(os.environ)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"can be joined at {address}"):
            joined(address).__enter__()
    assert len(asked) == 1
    assert dict(os.environ) == before


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "head", "local", "ray://head"])
def test_what_is_no_address_of_a_head_is_told(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ray, "init")
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS: {address}, must be the HOST:PORT of"):
        joined(address).__enter__()


def test_ray_s_client_server_is_no_way_in_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray, "init")
    with pytest.raises(ConfigError, match="^RAY_ADDRESS: ray://head:10001, must be the"):
        ray_cluster("ray://head:10001", print).__enter__()


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_job_s_processes_look_for_no_modules_where_the_command_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_ours: bool
) -> None:
    """But for our own source tree."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    init_ray()
    here = ROOT if is_ours else tmp_path
    monkeypatch.chdir(here)
    folders = given["job_config"]._py_driver_sys_path
    folders.extend([str(here), "/elsewhere"])
    assert folders == ([str(here), "/elsewhere"] if is_ours else ["/elsewhere"])


@pytest.mark.parametrize(
    ("address", "is_ours"), [(None, True), ("127.0.0.1:1", True), ("ray://127.0.0.1:1", False)]
)
def test_a_client_servers_job_is_its_own(
    monkeypatch: pytest.MonkeyPatch, address: str | None, is_ours: bool
) -> None:
    """Ray would send a job's config there, and cannot."""
    given: dict[str, object] = {}
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    init_ray(address=address)
    assert given["address"] == address
    assert ("job_config" in given) == is_ours


def test_what_ends_the_command_still_does_when_it_has_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    monkeypatch.setattr(ray, "init", init)
    with stop_signals() as stop:
        init_ray()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(SAID_S)
