"""`kvrelay status`: pools, replicas, load and scaling of a running cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from typing import NamedTuple

from cluster.commands.console import answer
from cluster.commands.numbers import number
from cluster.commands.plane_flags import add_plane_flags, given_plane_flags, load_plane
from cluster.status.local_clusters import LocalCluster, local_clusters
from cluster.status.table import as_text
from cluster.status.view import Status
from engine.errors import ConfigError, UnavailableError
from protos.rpc import Plane, RpcConfig

_WATCH_S, _LEAST_WATCH_S, _MOST_WATCH_S = 2.0, 0.2, 86_400.0
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


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
    parser.add_argument(
        "--watch",
        type=number,
        nargs="?",
        const=_WATCH_S,
        metavar="S",
        help=f"again every S seconds ({_WATCH_S:g} if not said) until Ctrl-C; with --json a line"
        " each time",
    )
    add_plane_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 where the application can answer."""
    every_s = arguments.watch
    if every_s is not None and not _LEAST_WATCH_S <= every_s <= _MOST_WATCH_S:
        least, most = f"{_LEAST_WATCH_S:g}", f"{_MOST_WATCH_S:g}"
        raise ConfigError("watch", f"{every_s:g} s, must be {least} to {most}")
    wanted = _wanted(arguments)
    if wanted.ray_auth_mode:  # Ray reads it when it is imported
        os.environ.setdefault("RAY_AUTH_MODE", wanted.ray_auth_mode)
    from cluster.status.gather import observed

    show = _show_json if arguments.json else _show_text
    with observed(wanted.ray_address, wanted.plane, wanted.url) as look:
        while True:
            status = look()
            show(status, again=every_s is not None)
            if every_s is None:
                return 0 if status.answers else 1
            time.sleep(every_s)


def _show_json(status: Status, *, again: bool) -> None:
    answer(json.dumps(asdict(status), indent=None if again else 2))


def _show_text(status: Status, *, again: bool) -> None:
    now = time.time()
    text = as_text(status, now)
    if again and sys.stdout.isatty():
        # In place of what stood there, line by line, so that nothing flickers.
        lines = text.replace("\n", f"{_REST_OF_LINE}\n")
        text = f"{_HOME}{_at(now)}{_REST_OF_LINE}\n{lines}{_REST_OF_SCREEN}"
    elif again:
        text = f"{_at(now)}\n{text}\n"
    answer(text)


def _at(now: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))


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
