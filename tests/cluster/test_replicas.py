"""What Serve is told of the replicas, and what a worker's replica does for itself."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve import Deployment

from cluster.app import application_of
from cluster.cluster_args import ClusterArgs
from cluster.open_files import ENABLED
from cluster.replicas import ingress_replica, worker_replica
from cluster.replicas.ingress_replica import _access_check, _check_found
from cluster.replicas.worker_replica import WorkerReplica, check_reach
from cluster.succession import SUCCESSION_S
from engine.errors import ConfigError, UnavailableError
from protos.errors import PlaneError
from protos.rpc import Plane
from protos.secret import Secret
from tests.processes import ROOT


def deployments(args: ClusterArgs) -> dict[str, Deployment]:
    ingress = application_of(args)._bound_deployment
    _, *pools = list[Any](ingress.init_args)
    return {one.name: one for one in (ingress, *(pool._bound_deployment for pool in pools))}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"request_timeout_s": 86400.0, "drain_s": 86400.0},
        {"decode": {"replicas": "1-3"}, "request_timeout_s": 5.0, "drain_s": 0.0},
    ],
)
def test_a_replica_that_is_replaced_ends_whatever_it_may_have(said: dict[str, Any]) -> None:
    """Its successor is there first; Serve kills nobody before the longest request is over, which
    may have come at the last moment in which it was still taken."""
    args = ClusterArgs.checked(said)
    every = deployments(args)
    assert every.keys() == {"ingress", "decode", "prefill"}
    for one in every.values():
        config = one._deployment_config
        least_s = SUCCESSION_S + args.request_timeout_s + args.drain_s
        assert config.graceful_shutdown_timeout_s > least_s
        assert config.max_surge_percent == 100


async def test_serve_is_told_of_a_worker_that_should_be_replaced() -> None:
    problems: list[str | None] = [None, "the engine makes no steps"]
    replica: Any = SimpleNamespace(_node=SimpleNamespace(problem=lambda: problems.pop(0)))
    await WorkerReplica.check_health(replica)
    with pytest.raises(UnavailableError, match="the engine makes no steps"):
        await WorkerReplica.check_health(replica)


@pytest.mark.parametrize(
    ("said", "secret", "num_nodes", "host"),
    [
        ("node", None, 1, "127.0.0.1"),
        ("node", None, 2, "192.0.2.1"),
        ("node", Secret(b"x" * 16), 1, "192.0.2.1"),
        ("192.0.2.2", None, 1, "192.0.2.2"),
        ("127.0.0.1", Secret(b"x" * 16), 2, "127.0.0.1"),
    ],
)
def test_workers_of_one_machine_need_no_secret(
    said: str, secret: Secret | None, num_nodes: int, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_replica, "num_nodes", lambda: num_nodes)
    monkeypatch.setattr(worker_replica, "node_address", lambda: "192.0.2.1")
    args = ClusterArgs.checked({"worker_host": said})
    assert worker_replica.worker_host(args, Plane(secret=secret)) == host


def test_a_worker_that_others_reach_has_a_secret() -> None:
    check_reach(Plane(), "127.0.0.1:0")
    check_reach(Plane(secret=Secret(b"x" * 16)), "192.0.2.1:0")
    with pytest.raises(PlaneError, match=r"worker_host: 192\.0\.2\.1:0 can .*KVRELAY_SECRET"):
        check_reach(Plane(), "192.0.2.1:0")


@pytest.mark.parametrize(
    ("host", "num_nodes", "reason"),
    [("0.0.0.0", 1, "host: 0.0.0.0 is beyond this"), ("127.0.0.1", 2, "the cluster has 2 nodes")],
)
def test_an_ingress_without_keys_is_for_one_machine(
    host: str, num_nodes: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what Serve's front and Ray's nodes are where it runs, whoever has deployed it."""
    monkeypatch.setattr(ingress_replica, "num_nodes", lambda: 1)
    _access_check(None, ClusterArgs(), "127.0.0.1")()
    monkeypatch.setattr(ingress_replica, "num_nodes", lambda: num_nodes)
    open_to_all = ClusterArgs.checked({"front": {"allow_unauthenticated": True}})
    _access_check(None, open_to_all, host)()
    with pytest.raises(ConfigError, match=reason):
        _access_check(None, ClusterArgs(), host)()


def test_an_ingress_does_not_start_where_its_front_would_not_find_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By `serve deploy`; else HAProxy answered 500 to everything."""
    _check_found("::1")
    monkeypatch.setenv(ENABLED, "1")
    with pytest.raises(ConfigError, match="host: ::1, .* may be 0.0.0.0 or ::, "):
        _check_found("::1")


def test_a_replica_starts_where_the_folder_has_been_removed(tmp_path: Path) -> None:
    """That Ray was started in: torch ended each that was to take another's place."""
    code = """
import os
from cluster.replicas.worker_replica import leave_removed_folder
os.rmdir(os.getcwd())
leave_removed_folder()
import torch
"""
    folder = tmp_path / "removed"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)
