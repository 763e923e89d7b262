"""Asks Serve's controller, the workers and the autoscaling policy how a running cluster is."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get
from ray.serve.exceptions import RayServeException

from cluster.app import APP_NAME
from cluster.autoscaling import DECISIONS_KEY, INGRESS
from cluster.joined_ray import joined
from cluster.membership import MEMBERSHIP, Replicas
from cluster.pools import Published, read_metadata
from cluster.ray_cluster import address
from cluster.serve_details import front_address, serve_details
from cluster.status.view import Heard, IngressLoad, Status, status_of
from engine.errors import UnavailableError
from protos.rpc import Plane
from router.subscriber import one_report
from router.workers import Leg

_MEMBERS_S = 5.0
_REPORT_S = 2.5  # a report is a second late where an engine is stuck
_POLL_S = 0.05


def gather(ray_address: str, plane: Plane, url: str) -> Status:
    """UnavailableError where there is no cluster. `url`: the front's, or empty."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    with joined(ray_address, configure_logging=False, logging_level=logging.ERROR):
        details, application = _details(ray_address)
        published = _published(application)
        heard = asyncio.run(_hear(published, plane))
        front = url or _front(details)
        decisions = _decisions(APP_NAME)
        return status_of(front, address(), application, heard, _ingresses(), decisions)


def _details(ray_address: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Serve's, and of them the application's."""
    details = serve_details()
    if details is None or APP_NAME not in details["applications"]:
        raise UnavailableError(f"no kvrelay application runs on the Ray cluster at {ray_address}")
    return details, details["applications"][APP_NAME]


def _published(application: Mapping[str, Any]) -> dict[str, Published]:
    """What each running worker says of itself. Serve tells it to routers alone, so there is one
    here for as long as it takes."""
    known: dict[str, Replicas] = {}
    unsubscribe = MEMBERSHIP.subscribe(lambda pool, replicas: known.update({pool: replicas}))
    wanted = {
        leg: {one["replica_id"] for one in pool["replicas"] if one["state"] == "RUNNING"}
        for leg, pool in application["deployments"].items()
        if leg in tuple(Leg)
    }
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    handles = [
        serve.get_deployment_handle(leg, APP_NAME).options(method_name="check_health")
        for leg, replicas in wanted.items()
        if replicas
    ]
    end = time.monotonic() + _MEMBERS_S
    while handles and time.monotonic() < end:
        if all(replicas <= known.get(leg, {}).keys() for leg, replicas in wanted.items()):
            break
        time.sleep(_POLL_S)
    unsubscribe()
    metadata = {name: said for replicas in known.values() for name, said in replicas.items()}
    read = {name: read_metadata(said) for name, said in metadata.items()}
    return {name: one for name, one in read.items() if one is not None}


async def _hear(published: Mapping[str, Published], plane: Plane) -> dict[str, Heard]:
    heard = await asyncio.gather(*(_ask(one, plane) for one in published.values()))
    return dict(zip(published, heard, strict=True))


async def _ask(published: Published, plane: Plane) -> Heard:
    worker = published.worker
    channel = plane.channel(worker.address)
    try:
        report = await one_report(channel, _REPORT_S)
    finally:
        await channel.close()
    return Heard(worker.address, worker.incarnation, report)


def _ingresses() -> dict[str, IngressLoad]:
    """Of those that answer."""
    asked = serve.get_deployment_handle(INGRESS, APP_NAME).broadcast("current_load")
    try:
        answers = asked.results(timeout_s=_REPORT_S, return_exceptions=True)
    except (TimeoutError, RayError, RayServeException):
        return {}
    said = [one for one in answers if not isinstance(one, BaseException)]
    return {replica: IngressLoad(*numbers) for replica, *numbers in said}


def _decisions(application: str) -> dict[str, Any]:
    told = _internal_kv_get(DECISIONS_KEY + application)
    decisions: dict[str, Any] = {} if told is None else json.loads(told)
    return decisions


def _front(details: Mapping[str, Any]) -> str:
    front = front_address(details)
    return "no front" if front is None else front.url
