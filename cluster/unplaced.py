"""Why Ray finds no node for a replica, as far as its nodes tell. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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


class _Wish(NamedTuple):
    """What a node is to have: by itself, and as what one does that has it not."""

    words: str
    has: str
    fits: Callable[[Node], bool]
    may_pass: bool = False


def obstacle(placement: Placement, nodes: Sequence[Node]) -> Obstacle | None:
    """None where some node could take one more. What nodes have that lack something else is said
    beside it, where some other node has that."""
    left, shared = nodes, list[str]()
    for wish in _wishes(placement):
        fitting = [node for node in left if wish.fits(node)]
        if not fitting:
            is_somewhere = shared and any(wish.fits(node) for node in nodes)
            such = f"no node with {' and '.join(shared)}" if is_somewhere else "no node"
            return Obstacle(f"{such} {wish.has}", wish.may_pass)
        if len(fitting) < len(left):
            shared.append(wish.words)
        left = fitting
    return None


def _wishes(placement: Placement) -> Iterator[_Wish]:
    for label, wanted in placement.label_selector.items():
        words = f"{label}={wanted}"
        yield _Wish(words, f"has the label {words}", partial(_is_labelled, label, wanted))
    demand = _demand(placement)
    for name, amount in demand.items():
        words = f"{amount:g} {name}"
        yield _Wish(words, f"has {words}", partial(_has, name, amount))
    most = placement.max_replicas_per_node
    if most is not None:
        bound = f"(max_replicas_per_node: {most})"
        yield _Wish(f"a place {bound}", f"may take one more {bound}", partial(_has_place, most))
    for name, amount in demand.items():
        words = f"{amount:g} {name} free"
        yield _Wish(words, f"has {words}", partial(_has_free, name, amount), may_pass=True)


def _is_labelled(label: str, wanted: str, node: Node) -> bool:
    return _matches(node.labels.get(label), wanted)


def _has(name: str, amount: float, node: Node) -> bool:
    return node.resources.get(name, 0) >= amount


def _has_place(most: int, node: Node) -> bool:
    return node.num_replicas < most


def _has_free(name: str, amount: float, node: Node) -> bool:
    return node.free.get(name, 0) >= amount


def _demand(placement: Placement) -> dict[str, float]:
    """By Ray's names."""
    demand = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    return {name: amount for name, amount in demand.items() if amount > 0}


def _matches(value: str | None, wanted: str) -> bool:
    """`a`, `in(a,b)`, or either with a `!` before it, as Ray's label selectors have it."""
    positive = wanted.removeprefix("!")
    inner = positive.removeprefix("in(").removesuffix(")") if positive.startswith("in(") else ""
    values = [one.strip() for one in inner.split(",")] if inner else [positive]
    return (value in values) is not wanted.startswith("!")
