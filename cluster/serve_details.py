"""What Serve's controller says of itself, for the cluster that this process has joined."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from cluster.front_address import FrontAddress
from engine.errors import UnavailableError

APP_NAME = "kvrelay"  # the application that is ours
SERVICER = "protos.ingress_service.add_to_server"
# The generated one does, but for words of ours about bytes that are no message.
_SERVICERS = {SERVICER, "protos.ingress_pb2_grpc.add_GenerationServicer_to_server"}
# Of whom Ray or Serve does not reach, or not in time.
UNREACHED = (TimeoutError, RayError, RayServeException)
_GRPC_PORT = 9000  # Serve's default


def serve_details() -> dict[str, Any] | None:
    """Applications, deployments, replicas; None where Serve does not run."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    try:
        told = client.get_serve_details()
    except ActorDiedError:  # for good, by `serve shutdown`; one that is started anew is unavailable
        return None
    # Through JSON, which has words where Serve has enums.
    details: dict[str, Any] = json.loads(json.dumps(told, default=str))
    return details


def check_controller(timeout_s: float) -> None:
    """UnavailableError where Serve runs and its controller does not answer. Whoever else asks it
    waits for ever, be it only for a client of it."""
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        ray.get(controller.check_alive.remote(), timeout=timeout_s)
    except GetTimeoutError as error:
        message = f"Serve's controller has not answered for {timeout_s:g} s"
        raise UnavailableError(message) from error
    except (ValueError, ActorDiedError):
        return  # there is none, as `serve_details` tells


def application_details(name: str) -> dict[str, Any]:
    """UnavailableError where Serve has none of that name."""
    details = serve_details()
    if details is None or name not in details["applications"]:
        raise UnavailableError(f"Serve has no application {name} any more")
    application: dict[str, Any] = details["applications"][name]
    return application


def front_address(details: Mapping[str, Any]) -> FrontAddress | None:
    """Of the Serve whose details these are; None where it has no front."""
    client = _get_global_client()
    assert client is not None, "Serve runs"
    http = client.http_config  # with what is as by default, which details leave out
    if details.get("proxy_location") == "Disabled" or http.host is None:
        return None
    grpc = details.get("grpc_options") or {}
    has_service = not _SERVICERS.isdisjoint(grpc.get("grpc_servicer_functions") or ())
    grpc_port = grpc.get("port", _GRPC_PORT) if has_service else None
    return FrontAddress(str(http.host), int(http.port), grpc_port)
