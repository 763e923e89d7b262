"""`kvrelay serve`: prefill and decode workers on a Ray cluster, behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from cluster.access import check_access
from cluster.api_keys import VARIABLE
from cluster.cluster_args import ClusterArgs
from cluster.commands.console import say
from cluster.commands.engine_flags import add_engine_flags, given_knobs
from cluster.commands.front_flags import add_front_flags, given_front_flags, given_http_flags
from cluster.commands.plane_flags import add_plane_flags, given_plane_flags
from cluster.commands.seen_flags import (
    add_log_flags,
    add_metrics_flags,
    given_log_flags,
    given_targets_file,
)
from cluster.commands.serve_cluster import ADDRESS, serve_cluster
from cluster.commands.serve_file import IN_FILE, ServeFile
from cluster.commands.serve_front import WishedFront
from cluster.commands.serve_stop import LOST, ended_in_time, stop_signals
from cluster.front_address import LOOPBACK, FrontAddress
from cluster.metrics.targets import write_document
from cluster.text_side import TextSide, cluster_text_side
from cluster.worker_config import ConnectorChoice, WorkerConfig, in_rpc, merged
from decode_worker.answerer import LocalPrefill
from engine.errors import ConfigError
from engine.models.describe import describe
from router.workers import Leg


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder, Hugging Face id (default: bundled)")
    parser.add_argument("--config", metavar="FILE", help="YAML; flags win over what it says")
    parser.add_argument(
        "--check", action="store_true", help="say what a start would refuse, and start nothing"
    )
    add_front_flags(parser)
    parser.add_argument(
        "--grpc-port", type=int, metavar="N", help="also token ids by gRPC, on the same host"
    )
    pools = parser.add_argument_group("pools")
    for pool in (*Leg, "ingress"):
        pools.add_argument(f"--{pool}-replicas", metavar="N|MIN-MAX", help="default: 1")
    pools.add_argument(
        "--colocated", action="store_true", help="no prefill pool: decode workers read prompts"
    )
    pools.add_argument(
        "--local-prefill",
        choices=[mode.name.lower() for mode in LocalPrefill],
        help="whether decode workers compute prompts themselves (default: auto, where sooner)",
    )
    pools.add_argument(
        "--connector",
        choices=[str(choice) for choice in ConnectorChoice],
        help="what moves the cache (default: auto, the best that both ends have)",
    )
    pools.add_argument(
        "--drain",
        type=float,
        metavar="SECONDS",
        help="a worker that is stopped keeps for so long what another one could take"
        f" (default: {WorkerConfig.drain_s:g})",
    )
    add_plane_flags(parser)
    add_log_flags(parser)
    add_metrics_flags(parser)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    # Read when Ray is imported. Lines that differ in numbers alone are one to it, for some seconds.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    path = arguments.config
    file = ServeFile({}) if path is None else ServeFile.read(Path(path))
    args = cluster_args(arguments, file.args)
    with _front_in_place(arguments, file):
        wished = WishedFront.of(arguments, file)
        if _starts_ray():
            wished.check_here()
        host = wished.host or LOOPBACK
        check_access(args.keys(os.environ), args.front.allow_unauthenticated, host=host)
        if _starts_ray():
            wished.check_reached()
        _check_placement(args)
        if arguments.check:
            return _check(args)
        file.check_only_ours()
        with wished.here() if _starts_ray() else nullcontext() as own:
            return _run(args, wished, own)


@contextmanager
def _front_in_place(arguments: argparse.Namespace, file: ServeFile) -> Iterator[None]:
    """What is wrong with where Serve listens is told where it was said."""
    try:
        yield
    except ConfigError as error:
        place = IN_FILE.get(error.field)
        if place is None or getattr(arguments, error.field) is not None:
            raise
        if getattr(file, error.field) is None:
            raise
        raise ConfigError(place, error.message) from error


def cluster_args(arguments: argparse.Namespace, options: Mapping[str, Any]) -> ClusterArgs:
    pools = {
        pool: {"replicas": getattr(arguments, f"{pool}_replicas")} for pool in (*Leg, "ingress")
    }
    if arguments.colocated:
        if pools[Leg.PREFILL]["replicas"] is not None:
            raise ConfigError("prefill_replicas", "not with --colocated")
        pools[Leg.PREFILL]["replicas"] = 0
    given = {
        "model": arguments.model,
        "served_model_name": arguments.served_model_name,
        **given_http_flags(arguments),
        "local_prefill": arguments.local_prefill,
        "connector": arguments.connector,
        "drain_s": arguments.drain,
        "engine": given_knobs(arguments),
        "rpc": given_plane_flags(arguments),
        "front": given_front_flags(arguments),
        "log": given_log_flags(arguments),
        "metrics_targets_file": given_targets_file(arguments),
        "worker_host": "127.0.0.1" if _starts_ray() else None,
        **{pool: said for pool, said in pools.items() if said["replicas"] is not None},
    }
    if VARIABLE in os.environ:  # a cluster that we join has an environment of its own
        given["front"] = {**given["front"], "require_api_key": True}
    said = {name: value for name, value in given.items() if value is not None}
    return ClusterArgs.checked(merged(options, said))


def _check_placement(args: ClusterArgs) -> None:
    from cluster.app import application_of  # loads Ray

    application_of(args)


def _check(args: ClusterArgs) -> int:
    """What takes neither weights nor other machines."""
    from engine.sizing import check_cache, decide_shape  # loads torch

    text = _text_side(args, weights=False)
    model = describe(text.source)
    for leg in _legs(args):
        engine = args.worker(leg, LOOPBACK).engine
        with args.in_engine(leg):
            check_cache(engine, decide_shape(engine, model), model)
    say(f"{', '.join(text.names)}: nothing of it is refused; nothing was started")
    return 0


def _run(args: ClusterArgs, wished: WishedFront, own: FrontAddress | None) -> int:
    """`own`: the front of a Ray cluster that is to be started; None to join one."""
    text = _text_side(args, weights=args.engine_config.load_format != "dummy")
    say("joining the Ray cluster" if own is None else "starting Ray")
    is_ours = own is not None
    with stop_signals(while_starting=not is_ours) as stop, ended_in_time(stop, is_ours=is_ours):
        try:
            serve_cluster(args, wished, own, text.names[0], stop)
        except Exception:
            if not stop.lost:
                raise  # else it has been told already what everything fails without
        finally:
            if is_ours and args.metrics_targets_file is not None:
                with suppress(OSError):  # which the ingresses have told of
                    write_document(Path(args.metrics_targets_file), [])
    say("stopped")
    if stop.lost:
        os._exit(LOST)  # Ray's way out of a process would be to wait for its head
    return LOST if stop.deleted else 0


def _text_side(args: ClusterArgs, *, weights: bool) -> TextSide:
    """What a replica would fail on, sooner."""
    if _starts_ray():  # on a cluster of others' each machine has files of its own
        plane = args.plane()
        with in_rpc():
            plane.check_listen(f"{LOOPBACK}:0")
    text = cluster_text_side(args, weights=weights)
    model = describe(text.source)
    for leg in _legs(args):
        with args.in_engine(leg):
            model.length_for(args.worker(leg, LOOPBACK).engine.max_model_len)
    return text


def _legs(args: ClusterArgs) -> list[Leg]:
    return [Leg.DECODE] if args.is_colocated else list(Leg)


def _starts_ray() -> bool:
    return not os.environ.get(ADDRESS)
