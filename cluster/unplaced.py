"""Why Ray finds no node for a replica, as far as its nodes tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cluster.cluster_args import Placement


class Node(NamedTuple):
    """One that is alive. `num_replicas`: of the pool in question."""

    labels: Mapping[str, str]
    resources: Mapping[str, float]
    free: Mapping[str, float]
    num_replicas: int = 0


class Obstacle(NamedTuple):
    """`may_pass`: with what goes on there, without another node; also a replica that was placed a
    moment ago takes what it counts as."""

    why: str
    may_pass: bool = False


def obstacle(placement: Placement, nodes: Sequence[Node]) -> Obstacle | None:
    """None where some node could take one more."""
    left = nodes
    for label, wanted in placement.label_selector.items():
        left = [node for node in left if _matches(node.labels.get(label), wanted)]
        if not left:
            return Obstacle(f"no node has the label {label}={wanted}")
    demand = _demand(placement)
    for name, amount in demand.items():
        left = [node for node in left if node.resources.get(name, 0) >= amount]
        if not left:
            return Obstacle(f"{_such(placement)} has {amount:g} {name}")
    most = placement.max_replicas_per_node
    if most is not None:
        left = [node for node in left if node.num_replicas < most]
        if not left:
            return Obstacle(f"{_such(placement)} may take one more (max_replicas_per_node: {most})")
    for name, amount in demand.items():
        left = [node for node in left if node.free.get(name, 0) >= amount]
        if not left:
            return Obstacle(f"{_such(placement)} has {amount:g} {name} free", may_pass=True)
    return None


def _demand(placement: Placement) -> dict[str, float]:
    """By Ray's names."""
    demand = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    return {name: amount for name, amount in demand.items() if amount > 0}


def _such(placement: Placement) -> str:
    if not placement.label_selector:
        return "no node"
    labels = ", ".join(f"{label}={wanted}" for label, wanted in placement.label_selector.items())
    return f"no node with {labels}"


def _matches(value: str | None, wanted: str) -> bool:
    """`a`, `in(a,b)`, or either with a `!` before it, as Ray's label selectors have it."""
    positive = wanted.removeprefix("!")
    inner = positive.removeprefix("in(").removesuffix(")") if positive.startswith("in(") else ""
    values = [one.strip() for one in inner.split(",")] if inner else [positive]
    return (value in values) is not wanted.startswith("!")
