"""A running cluster as its user sees it: plain values, joined from what Serve, the workers and
the autoscaling policy say. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.autoscaling import INGRESS
from protos.events_pb2 import LoadReport
from router.workers import Leg


@dataclass(frozen=True, slots=True)
class Link:
    peer: str  # its address, or its incarnation where that is not known
    connector: str
    transport: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Load:
    num_running: int
    num_waiting: int
    num_fetching: int
    num_leases: int
    num_queued_tokens: int
    kv_use: float
    hit_rate: float | None  # of prompt tokens; None before the first prompt
    draining: bool
    unhealthy: str
    links: Sequence[Link]


@dataclass(frozen=True, slots=True)
class IngressLoad:
    """Requests; those that wait for workers are open, too. `problem`: why it can answer none."""

    num_open: int
    num_waiting: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Replica:
    """`address` and `load` are a worker's, `ingress` is an ingress's; None where it has not said
    them."""

    id: str
    state: str
    node: str
    pid: int | None
    address: str | None
    load: Load | None
    ingress: IngressLoad | None = None
    refusal: str = ""  # a worker's, to say its load


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the autoscaling policy decided last of a pool. Times are Unix time."""

    least: int
    most: int
    target: int
    at: float
    why: str
    changed_at: float | None
    change: str


@dataclass(frozen=True, slots=True)
class Pool:
    """`target`: None where Serve lists no pools, and whoever answers is all that is known."""

    name: str
    state: str
    message: str
    target: int | None
    is_scaled: bool
    replicas: Sequence[Replica]
    scaling: Scaling | None


@dataclass(frozen=True, slots=True)
class Status:
    """`state` and `message` are Serve's, to whom an application that replaces one of several
    workers is unhealthy. `answers`: whether it can, all the same."""

    url: str
    ray_address: str
    state: str
    message: str
    answers: bool
    pools: Sequence[Pool]


@dataclass(frozen=True, slots=True)
class Heard:
    """Of one worker: what it published of itself, and its load report if it answered, or in which
    words it refused to."""

    address: str
    incarnation: int
    report: LoadReport | None
    refusal: str = ""


def status_of(
    url: str,
    ray_address: str,
    application: Mapping[str, Any],
    heard: Mapping[str, Heard],
    ingresses: Mapping[str, IngressLoad],
    decisions: Mapping[str, Any],
    known: Mapping[str, Collection[str]],
) -> Status:
    """`application` is of Serve's details; `heard` and `ingresses` go by replica. `known`: the
    replicas of each pool that were found without these: Serve lists none from when it is given a
    new file until it has built what that says, for ever where that fails; and all go on."""
    peers = {one.incarnation: one.address for one in heard.values()}
    listed = application["deployments"] or _as_listed(known)
    pools = [
        _pool(name, details, heard, ingresses, peers, decisions.get(name))
        for name, details in sorted(listed.items())
    ]
    state, message = str(application["status"]), application.get("message") or ""
    return Status(url, ray_address, state, message, _answers(state, pools), pools)


def _answers(state: str, pools: Sequence[Pool]) -> bool:
    """An ingress runs, and a decode worker, and as far as ingresses say, whatever else they need.
    One that has not answered the command says nothing; Serve soon replaces it."""
    running = {
        pool.name: [one for one in pool.replicas if one.state == "RUNNING"] for pool in pools
    }
    ingresses = [one.ingress for one in running.get(INGRESS, ())]
    some_can = any(one is None or not one.problem for one in ingresses)
    return state != "DELETING" and some_can and bool(running.get(Leg.DECODE))


def _as_listed(known: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "status": "UNLISTED",
            "deployment_config": {},
            "target_num_replicas": None,
            "replicas": [{"replica_id": one, "state": "RUNNING"} for one in sorted(replicas)],
        }
        for name, replicas in known.items()
        if replicas
    }


def _pool(
    name: str,
    details: Mapping[str, Any],
    heard: Mapping[str, Heard],
    ingresses: Mapping[str, IngressLoad],
    peers: Mapping[int, str],
    decision: Mapping[str, Any] | None,
) -> Pool:
    range_ = details["deployment_config"].get("autoscaling_config") or {}
    # Where they are equal, Serve only tells the policy of its load.
    is_scaled = range_.get("min_replicas") != range_.get("max_replicas")
    scaling = None
    if decision is not None and is_scaled:
        scaling = Scaling(**{key: decision[key] for key in Scaling.__dataclass_fields__})
    replicas = [_replica(one, heard, ingresses, peers) for one in details["replicas"]]
    return Pool(
        name,
        str(details["status"]),
        details.get("message") or "",
        details["target_num_replicas"],
        is_scaled,
        replicas,
        scaling,
    )


def _replica(
    details: Mapping[str, Any],
    heard: Mapping[str, Heard],
    ingresses: Mapping[str, IngressLoad],
    peers: Mapping[int, str],
) -> Replica:
    name = str(details["replica_id"])
    worker = heard.get(name)
    load = None
    if worker is not None and worker.report is not None:
        load = _load(worker.report, peers)
    return Replica(
        name,
        str(details["state"]),
        str(details.get("node_ip") or ""),
        details.get("pid"),
        None if worker is None else worker.address,
        load,
        ingresses.get(name),
        "" if worker is None else worker.refusal,
    )


def _load(report: LoadReport, peers: Mapping[int, str]) -> Load:
    uses = [(one.held + one.quarantined) / max(1, one.total) for one in report.blocks]
    hits, queries = report.num_hit_tokens, report.num_query_tokens
    links = [
        Link(
            peers.get(link.peer_incarnation, f"{link.peer_incarnation:x}"),
            link.connector,
            link.transport,
            link.bytes_per_s,
            link.latency_s,
        )
        for link in report.links
    ]
    return Load(
        report.num_running,
        report.num_waiting,
        report.num_fetching,
        report.num_leases,
        report.num_queued_tokens,
        max(uses, default=0.0),
        hits / queries if queries else None,
        report.draining,
        report.unhealthy,
        links,
    )
