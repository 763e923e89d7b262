"""What `kvrelay serve` shows of its replicas: while they are placed and load, and when they run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cluster.cluster_args import ClusterArgs, Placement
from cluster.status.table import in_one_line
from cluster.unplaced import Node, obstacle
from cluster.worker_config import ConnectorChoice

# A replica that Ray has just placed has not said so yet, but what it takes is taken.
_PASSES_S = 20.0


def told_pools(args: ClusterArgs, application: Mapping[str, Any]) -> list[str]:
    """A line for each pool, with the nodes of its replicas, and one for what goes between them."""
    rows = [
        (name, _count(placement, where), _places(where))
        for name, placement in _placements(args).items()
        if (where := _where(application, name))
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  on {c}" for a, b, c in rows]
    return [*lines, _hand_over(args)]


def _placements(args: ClusterArgs) -> dict[str, Placement]:
    return {"prefill": args.prefill, "decode": args.decode, "ingress": args.ingress}


def _where(application: Mapping[str, Any], pool: str) -> Counter[str]:
    """The nodes' addresses, and how many replicas run on each."""
    replicas = application["deployments"].get(pool, {}).get("replicas", ())
    return Counter(str(one.get("node_ip")) for one in replicas if one["state"] == "RUNNING")


def _count(placement: Placement, where: Counter[str]) -> str:
    count = f"{where.total()} replica" + "s" * (where.total() != 1)
    return f"{count} of {placement.replicas}" if placement.range.is_scaled else count


def _places(where: Counter[str]) -> str:
    if len(where) == 1:
        return next(iter(where))
    return ", ".join(f"{place} ({count})" for place, count in sorted(where.items()))


def _hand_over(args: ClusterArgs) -> str:
    if args.is_colocated:
        return "no prefill pool: decode workers read prompts"
    if args.connector is ConnectorChoice.AUTO:
        return "prompts are handed over by nixl where it can, else by socket"
    return f"prompts are handed over by {args.connector}"


class Loading:
    """Tells how far an application is, from what Serve and Ray say of it."""

    def __init__(self, args: ClusterArgs, now: Callable[[], float] = time.monotonic) -> None:
        self._placements = _placements(args)
        self._now = now
        self._since: dict[str, float] = {}  # of replicas without a node

    def line(self, application: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
        """`application` is of Serve's details; `nodes` go by their ids."""
        return "; ".join(
            f"{name}: {', '.join(self._told(name, deployment, nodes))}"
            for name, deployment in application["deployments"].items()
            if deployment["replicas"]
        )

    def _told(
        self, pool: str, deployment: Mapping[str, Any], nodes: Mapping[str, Node]
    ) -> Iterator[str]:
        replicas = deployment["replicas"]
        for state, count in Counter(one["state"] for one in replicas).items():
            yield f"{count} {state.lower()}"
        waiting_s = self._waiting_s(replicas)
        message = in_one_line(str(deployment.get("message") or ""))
        why = self._why(pool, replicas, nodes, max(waiting_s, default=0.0)) if waiting_s else ""
        if why:
            yield f"{len(waiting_s)} not placed: {why}"
        elif message:
            yield message

    def _waiting_s(self, replicas: Sequence[Mapping[str, Any]]) -> list[float]:
        """For how long each has been without a node."""
        without = [
            str(one["replica_id"])
            for one in replicas
            if one["state"] == "STARTING" and one.get("node_id") is None
        ]
        return [self._now() - self._since.setdefault(one, self._now()) for one in without]

    def _why(
        self,
        pool: str,
        replicas: Sequence[Mapping[str, Any]],
        nodes: Mapping[str, Node],
        waiting_s: float,
    ) -> str:
        counts = Counter(one.get("node_id") for one in replicas)
        seen = [node._replace(num_replicas=counts[name]) for name, node in nodes.items()]
        found = obstacle(self._placements[pool], seen)
        if found is None or (found.may_pass and waiting_s < _PASSES_S):
            return ""
        return found.why
