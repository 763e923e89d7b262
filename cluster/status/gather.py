"""Asks Serve's controller, the workers and the autoscaling policy how a running cluster is."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.experimental.internal_kv import _internal_kv_get
from ray.serve.handle import DeploymentHandle

from cluster.autoscaling import DECISIONS_KEY, INGRESS
from cluster.joined_ray import address, joined
from cluster.membership import MEMBERSHIP, Replicas
from cluster.published import Published, read_metadata
from cluster.serve_details import (
    APP_NAME,
    UNREACHED,
    check_controller,
    front_address,
    serve_details,
)
from cluster.status.view import Heard, IngressLoad, Status, status_of
from engine.errors import UnavailableError
from protos.events_pb2 import LoadReport
from protos.generation_pb2 import Failure
from protos.rpc import Plane
from router.subscriber import one_report
from router.workers import Leg

_CONTROLLER_S = 30.0  # one that was killed is back sooner
_MEMBERS_S = 5.0
_REPORT_S = 2.5  # a report is a second late where an engine is stuck
_POLL_S = 0.05


@contextmanager
def observed(ray_address: str, plane: Plane, url: str) -> Iterator[Callable[[], Status]]:
    """Asks as often as it is called. UnavailableError where there is no cluster, or none any more.
    `url`: the front's, or ""."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    with (
        joined(ray_address, configure_logging=False, logging_level=logging.ERROR),
        asyncio.Runner() as runner,  # one: gRPC's library stays with an event loop that has ended
    ):
        try:
            yield lambda: _status(ray_address, plane, url, runner)
        except UNREACHED as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            message = f"the cluster at {ray_address} has not answered to its end: {reason}"
            raise UnavailableError(message) from error


def _status(ray_address: str, plane: Plane, url: str, runner: asyncio.Runner) -> Status:
    details, application = _details(ray_address)
    published = _published(application)
    workers = {replica: one for pool in published.values() for replica, one in pool.items()}
    heard = runner.run(_hear(workers, plane))
    ingresses = _ingresses()
    front = url or _front(details)
    decisions = _decisions(APP_NAME)
    known: dict[str, Collection[str]] = {**published, INGRESS: ingresses}
    return status_of(front, address(), application, heard, ingresses, decisions, known)


def _details(ray_address: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Serve's, and of them the application's."""
    check_controller(_CONTROLLER_S)
    details = serve_details()
    if details is None or APP_NAME not in details["applications"]:
        raise UnavailableError(f"no kvrelay application runs on the Ray cluster at {ray_address}")
    return details, details["applications"][APP_NAME]


def _published(application: Mapping[str, Any]) -> dict[str, dict[str, Published]]:
    """What each running worker says of itself, by pool. Serve tells it to routers alone, so there
    is one of each pool here until Ray's cluster is left."""
    known: dict[str, Replicas] = {}
    unsubscribe = MEMBERSHIP.subscribe(lambda pool, replicas: known.update({pool: replicas}))
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    found = {leg: _handle(leg) for leg in Leg}
    handles = {
        leg: handle.options(method_name="check_health")
        for leg, handle in found.items()
        if handle is not None
    }
    wanted = {leg: _running(application, leg) for leg in handles}
    end = time.monotonic() + _MEMBERS_S
    while time.monotonic() < end:
        if all(_is_known(wanted[leg], known.get(leg, {})) for leg in handles):
            break
        time.sleep(_POLL_S)
    unsubscribe()
    return {leg: _read(known[leg]) for leg in handles if leg in known}


def _handle(pool: str) -> DeploymentHandle[Any] | None:
    """None where there is no such pool, or none yet."""
    try:
        return serve.get_deployment_handle(pool, APP_NAME)
    except KeyError:
        return None


def _running(application: Mapping[str, Any], pool: str) -> set[str] | None:
    """Ids of its running replicas; None where Serve lists no pools."""
    pools = application["deployments"]
    if not pools:
        return None
    replicas = pools[pool]["replicas"] if pool in pools else ()
    return {one["replica_id"] for one in replicas if one["state"] == "RUNNING"}


def _is_known(wanted: set[str] | None, known: Replicas) -> bool:
    return bool(known) if wanted is None else wanted <= known.keys()


def _read(replicas: Replicas) -> dict[str, Published]:
    read = {name: read_metadata(said) for name, said in replicas.items()}
    return {name: one for name, one in read.items() if one is not None}


async def _hear(published: Mapping[str, Published], plane: Plane) -> dict[str, Heard]:
    heard = await asyncio.gather(*(_ask(one, plane) for one in published.values()))
    return dict(zip(published, heard, strict=True))


async def _ask(published: Published, plane: Plane) -> Heard:
    worker = published.worker
    channel = plane.channel(worker.address)
    try:
        said = await one_report(channel, _REPORT_S)
    finally:
        await channel.close()
    if isinstance(said, LoadReport):
        return Heard(worker.address, worker.incarnation, said)
    refusal = "" if said.kind == Failure.KIND_UNAVAILABLE else said.message
    return Heard(worker.address, worker.incarnation, None, refusal)


def _ingresses() -> dict[str, IngressLoad]:
    """Of those that answer."""
    handle = _handle(INGRESS)
    if handle is None:
        return {}
    asked = handle.broadcast("current_load")
    try:
        answers = asked.results(timeout_s=_REPORT_S, return_exceptions=True)
    except UNREACHED:
        return {}
    said = [one for one in answers if not isinstance(one, BaseException)]
    return {replica: IngressLoad(*load) for replica, *load in said}


def _decisions(application: str) -> dict[str, Any]:
    told = _internal_kv_get(DECISIONS_KEY + application)
    decisions: dict[str, Any] = {} if told is None else json.loads(told)
    return decisions


def _front(details: Mapping[str, Any]) -> str:
    front = front_address(details)
    return "no front" if front is None else front.url
