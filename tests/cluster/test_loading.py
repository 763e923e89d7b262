"""What `kvrelay serve` shows until its pools run: where replicas are, or why they are nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.cluster_args import ClusterArgs, Placement
from cluster.commands.loading import Loading, told_pools
from cluster.unplaced import Node, Obstacle, obstacle

HEAD = Node({}, {"memory": 1e9}, {"memory": 1e9})
PREFILL = Node(
    {"role": "prefill"}, {"CPU": 8, "GPU": 1, "slot": 1}, {"CPU": 8, "GPU": 1, "slot": 1}
)
BUSY = Node({"role": "decode"}, {"CPU": 8, "GPU": 1}, {"CPU": 7})
NODES = [HEAD, PREFILL, BUSY]


def placement(**more: Any) -> Placement:
    return Placement(**more)


@pytest.mark.parametrize(
    "wanted",
    [
        placement(num_cpus=0),
        placement(num_cpus=8, num_gpus=1, resources={"slot": 1}),
        placement(label_selector={"role": "decode"}, num_cpus=7),
        placement(label_selector={"role": "in(decode, prefill)"}, num_gpus=1),
        placement(label_selector={"role": "!decode"}, num_gpus=1),
        placement(label_selector={"role": "!in(decode,x)", "other": "!x"}, num_gpus=1),
        placement(label_selector={"role": "decode"}, max_replicas_per_node=1),
    ],
)
def test_what_has_a_node_has_no_obstacle(wanted: Placement) -> None:
    assert obstacle(wanted, NODES) is None


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"label_selector": {"role": "encode"}}, "no node has the label role=encode"),
        (
            {"label_selector": {"role": "!in(decode,prefill)"}},
            "no node with role=!in(decode,prefill) has 1 CPU",
        ),
        ({"num_cpus": 16}, "no node has 16 CPU"),
        ({"num_cpus": 1, "num_gpus": 2}, "no node has 2 GPU"),
        ({"resources": {"decode_slot": 1}}, "no node has 1 decode_slot"),
        (
            {"label_selector": {"role": "decode"}, "resources": {"slot": 1}},
            "no node with role=decode has 1 slot",
        ),
    ],
)
def test_what_no_node_has_is_named(wanted: dict[str, Any], why: str) -> None:
    assert obstacle(placement(**wanted), NODES) == Obstacle(why)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (
            {"label_selector": {"zone": "b", "role": "decode"}},
            "no node with zone=b has the label role=decode",
        ),
        ({"num_cpus": 16, "num_gpus": 1}, "no node with 16 CPU has 1 GPU"),
        (
            {"num_gpus": 2, "max_replicas_per_node": 1},
            "no node with 2 GPU may take one more (max_replicas_per_node: 1)",
        ),
        ({"num_gpus": 0.5}, "no node with 0.5 GPU and 1 CPU free has 0.5 GPU free"),
        (
            {"label_selector": {"zone": "b"}, "max_replicas_per_node": 1, "num_cpus": 4},
            "no node with zone=b and a place (max_replicas_per_node: 1) has 4 CPU free",
        ),
    ],
)
def test_what_other_nodes_have_is_not_said_to_be_nowhere(wanted: dict[str, Any], why: str) -> None:
    """No two wishes are met by one node, and each of them by some."""
    many = Node({"zone": "a", "role": "decode"}, {"CPU": 8, "GPU": 2}, {"GPU": 2}, num_replicas=1)
    few = Node({"zone": "a"}, {"CPU": 1, "GPU": 1}, {})
    cores = Node({"zone": "b", "role": "prefill"}, {"CPU": 16}, {"CPU": 16}, num_replicas=1)
    other = Node({"zone": "b", "role": "prefill"}, {"CPU": 4, "GPU": 1}, {"CPU": 2})
    found = obstacle(placement(**wanted), [many, few, cores, other])
    assert found is not None
    assert found.why == why


def test_what_is_taken_may_be_given_back() -> None:
    wanted = placement(label_selector={"role": "decode"}, num_gpus=1)
    assert obstacle(wanted, NODES) == Obstacle("no node with role=decode has 1 GPU free", True)


def test_a_full_node_takes_no_more() -> None:
    wanted = placement(max_replicas_per_node=2)
    full = [node._replace(num_replicas=2) for node in NODES]
    assert obstacle(wanted, full) == Obstacle(
        "no node may take one more (max_replicas_per_node: 2)"
    )
    assert obstacle(wanted, [*full, PREFILL._replace(num_replicas=1)]) is None


def replica(name: str, state: str = "RUNNING", node: str | None = "a") -> dict[str, Any]:
    return {"replica_id": name, "state": state, "node_id": node, "node_ip": f"10.0.0.{node}"}


def application(**pools: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "deployments": {
            name: {"replicas": replicas, "message": ""} for name, replicas in pools.items()
        }
    }


def args(**more: Any) -> ClusterArgs:
    return ClusterArgs.checked(more)


def test_a_replica_without_a_node_is_told_with_its_reason() -> None:
    now = 100.0
    loading = Loading(
        args(decode={"num_gpus": 1}, prefill={"label_selector": {"role": "encode"}}), lambda: now
    )
    seen = application(
        prefill=[replica("p", "STARTING", None)],
        decode=[replica("d1"), replica("d2", "STARTING", None)],
        ingress=[],
    )
    nodes = {"a": PREFILL._replace(free={"CPU": 7})}
    unplaced = "prefill: 1 starting, 1 not placed: no node has the label role=encode"
    # Its GPU may be what d2 itself has just been given.
    assert loading.line(seen, nodes) == f"{unplaced}; decode: 1 running, 1 starting"
    now += 30
    taken = "1 not placed: no node has 1 GPU free"
    assert loading.line(seen, nodes) == f"{unplaced}; decode: 1 running, 1 starting, {taken}"
    seen = application(decode=[replica("d1"), replica("d2", "STARTING", "a")])
    assert loading.line(seen, nodes) == "decode: 1 running, 1 starting"


def test_what_serve_says_of_a_failure_is_told_in_a_line() -> None:
    seen = application(decode=[replica("d", "STARTING")])
    seen["deployments"]["decode"]["message"] = "It failed to start:\nTraceback\nConfigError: x: y\n"
    assert Loading(args()).line(seen, {}) == (
        "decode: 1 starting, It failed to start: ConfigError: x: y"
    )


def test_pools_are_told_with_their_nodes() -> None:
    seen = application(
        prefill=[replica("p", node="1")],
        decode=[replica("d1", node="2"), replica("d2", node="2"), replica("d3", node="3")],
        ingress=[replica("i", node="1"), replica("i2", "STARTING", None)],
    )
    assert told_pools(args(decode={"replicas": "1-4"}), seen) == [
        "prefill  1 replica          on 10.0.0.1",
        "decode   3 replicas of 1-4  on 10.0.0.2 (2), 10.0.0.3 (1)",
        "ingress  1 replica          on 10.0.0.1",
        "prompts are handed over by nixl where it can, else by socket",
    ]


def test_what_carries_prompts_is_told() -> None:
    seen = application(decode=[replica("d")])
    assert told_pools(args(connector="socket"), seen)[-1] == "prompts are handed over by socket"
    colocated = args(prefill={"replicas": 0})
    assert told_pools(colocated, seen)[-1] == "no prefill pool: decode workers read prompts"
