"""The node types of deploy/ray-cluster.yaml as nodes of a real cluster, all on this machine: who
joins it must have a key, each pool is only where its label is, and as often as it may."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster as Nodes
from ray.serve.context import _get_global_client

from cluster.app import APP_NAME
from cluster.cluster_args import ClusterArgs
from cluster.deployment import deploy
from tests.e2e.cluster import wait_until

FILE = Path(__file__).parents[2] / "deploy/ray-cluster.yaml"
DECODE_NODES, DECODE_REPLICAS = 2, 3
UP_S, SETTLED_S = 120.0, 3.0


class Placed(NamedTuple):
    address: str
    types: dict[str, str]  # of every node, by its id


@pytest.fixture(scope="module")
def placed() -> Iterator[Placed]:
    described = yaml.safe_load(FILE.read_text())["available_node_types"]
    with pytest.MonkeyPatch.context() as environment:
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
            environment.delenv(name, raising=False)
        environment.setenv("RAY_SERVE_LOG_TO_STDERR", "0")
        nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0})
        try:
            types = {}
            for name in ("prefill", *["decode"] * DECODE_NODES):
                node = nodes.add_node(num_cpus=4, labels=described[name]["labels"])
                types[node.node_id] = name
            nodes.wait_for_nodes()
            yield Placed(nodes.address, types)
        finally:
            nodes.shutdown()  # type: ignore[no-untyped-call]


def test_a_second_node_asks_for_a_key(placed: Placed) -> None:
    environment = {**os.environ, "RAY_ADDRESS": placed.address}
    command = [sys.executable, "-m", "cluster.cli", "serve", "--port", "0", "--colocated"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"api_key_file: none, and the cluster has {len(placed.types) + 1} nodes" in done.stderr


@pytest.fixture
def types(placed: Placed) -> Iterator[dict[str, str]]:
    """With this process in the cluster."""
    ray.init(address=placed.address, log_to_driver=False)
    try:
        yield placed.types
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def deployed() -> None:
    selector = {name: {"kvrelay-role": name} for name in ("prefill", "decode")}
    args = ClusterArgs.checked(
        {
            "model": "bundled",
            "engine": {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 2},
            "prefill": {"label_selector": selector["prefill"]},
            "decode": {
                "label_selector": selector["decode"],
                "replicas": DECODE_REPLICAS,
                "max_replicas_per_node": 1,
            },
            "worker_host": "127.0.0.1",
            "front": {"allow_unauthenticated": True},
        }
    )
    serve.start(proxy_location="Disabled")
    deploy(args)


def running() -> list[tuple[str, str]]:
    """The pool and the node of every replica that runs."""
    client = _get_global_client()
    assert client is not None
    details: dict[str, Any] = client.get_serve_details()
    deployments = details["applications"].get(APP_NAME, {}).get("deployments", {})
    return [
        (name, replica["node_id"])
        for name, deployment in deployments.items()
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"
    ]


@pytest.mark.timeout(200)
def test_each_pool_runs_on_its_own_nodes(types: dict[str, str]) -> None:
    deployed()

    def is_all_there() -> bool:
        return Counter(pool for pool, _ in running()) >= Counter(
            {"prefill": 1, "decode": DECODE_NODES, "ingress": 1}
        )

    wait_until(is_all_there, UP_S, lambda: str(running()))
    time.sleep(SETTLED_S)
    found = running()
    for pool in ("prefill", "decode"):
        assert {types[node] for name, node in found if name == pool} == {pool}
    # There is room for the third on either node, but not by its limit.
    per_node = Counter(node for name, node in found if name == "decode")
    assert list(per_node.values()) == [1] * DECODE_NODES
