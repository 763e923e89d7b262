"""The node types of deploy/ray-cluster.yaml as nodes of a real cluster, all on this machine: each
pool is only where its label is, and as often as it may."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Of every node, by its id."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_SERVE_LOG_TO_STDERR", "0")
    described = yaml.safe_load(FILE.read_text())["available_node_types"]
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        ids = {}
        for name in ("prefill", *["decode"] * DECODE_NODES):
            node = nodes.add_node(num_cpus=4, labels=described[name]["labels"])
            ids[node.node_id] = name
        nodes.wait_for_nodes()
        ray.init(address=nodes.address, log_to_driver=False)
        yield ids
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        nodes.shutdown()  # type: ignore[no-untyped-call]


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
