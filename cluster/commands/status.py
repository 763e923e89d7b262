"""`kvrelay status`: pools, replicas, load and scaling of a running cluster."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from typing import NamedTuple

from cluster.commands.console import answer
from cluster.commands.plane_flags import add_plane_flags, given_plane_flags, load_plane
from cluster.status.local_clusters import LocalCluster, local_clusters
from cluster.status.table import as_text
from engine.errors import ConfigError, UnavailableError
from protos.rpc import Plane, RpcConfig


class _Wanted(NamedTuple):
    """Where a cluster is, and how its workers are spoken to."""

    ray_address: str
    ray_auth_mode: str
    plane: Plane
    url: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port",
        type=int,
        metavar="N",
        help="of the cluster's front, where this machine has several; the variable RAY_ADDRESS"
        " names one elsewhere",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    add_plane_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 where the application can answer."""
    wanted = _wanted(arguments)
    if wanted.ray_auth_mode:  # Ray reads it when it is imported
        os.environ.setdefault("RAY_AUTH_MODE", wanted.ray_auth_mode)
    from cluster.status.gather import gather

    status = gather(wanted.ray_address, wanted.plane, wanted.url)
    if arguments.json:
        answer(json.dumps(asdict(status), indent=2))
    else:
        answer(as_text(status, time.time()))
    return 0 if status.answers else 1


def _wanted(arguments: argparse.Namespace) -> _Wanted:
    flags = given_plane_flags(arguments)
    ray_address = os.environ.get("RAY_ADDRESS")
    if ray_address:
        if arguments.port is not None:
            raise ConfigError("port", "is of a cluster on this machine; RAY_ADDRESS names another")
        return _Wanted(ray_address, "", load_plane(RpcConfig(**flags)), "")
    cluster = _of_this_machine(arguments.port)
    plane = load_plane(RpcConfig(**{**cluster.rpc, **flags}))
    return _Wanted(cluster.ray_address, cluster.ray_auth_mode, plane, cluster.url)


def _of_this_machine(port: int | None) -> LocalCluster:
    clusters = local_clusters()
    if port is not None:
        clusters = [one for one in clusters if one.url.endswith(f":{port}/v1")]
    if not clusters:
        at = "" if port is None else f" at port {port}"
        raise UnavailableError(
            f"`kvrelay serve` of this user does not run on this machine{at}; RAY_ADDRESS names a"
            " cluster elsewhere"
        )
    if len(clusters) > 1:
        urls = ", ".join(one.url for one in clusters)
        raise ConfigError("port", f"which one? {urls}")
    return clusters[0]
