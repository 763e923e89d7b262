"""A cluster's course under `kvrelay serve`: started or joined, announced, and taken away."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cluster.access import check_access
from cluster.cluster_args import ClusterArgs, Placement
from cluster.commands.console import say
from cluster.commands.loading import told_pools
from cluster.commands.local import announcement
from cluster.commands.serve_application import (
    end_answers,
    met_ingresses,
    wait_until_known,
    wait_until_running,
    watch_application,
)
from cluster.commands.serve_front import WishedFront
from cluster.commands.serve_stop import Stop
from cluster.front_address import FrontAddress, front_url
from cluster.own_processes import begin_again
from cluster.status.local_clusters import LocalCluster, noted

ADDRESS = "RAY_ADDRESS"
_AGAIN = "KVRELAY_BEGUN_AGAIN"


def serve_cluster(
    args: ClusterArgs, wished: WishedFront, own: FrontAddress | None, name: str, stop: Stop
) -> None:
    from cluster.deployment import deployed
    from cluster.ray_cluster import log_folder, own_ray_cluster, ray_cluster
    from cluster.replica_words import hear
    from cluster.serve_details import APP_NAME

    is_second = os.environ.pop(_AGAIN, None) is not None
    environment = {**os.environ, _AGAIN: "1"}  # as it was before a cluster was started

    def lost(how: str) -> None:
        what = f"{how}, and nothing goes on without it"
        where = f"Ray's logs: {log_folder()}"
        if not (stop.serves or is_second):
            say(f"{what}: once more from the beginning; {where}")
            begin_again(environment)
        then = "stopping; Ctrl-C to stop at once" if stop.serves else "it does not start"
        say(f"{what}: {then}; {where}")
        stop.lose()

    def cluster() -> AbstractContextManager[None]:
        if own is None:
            return ray_cluster(os.environ[ADDRESS], say)
        return own_ray_cluster(_num_cpus(args), lost)

    with cluster():
        if own is None:
            hear(APP_NAME, say)
        front, started = _front(args, wished, own)
        with _noted(args, own), deployed(args, started, to_stay=own is not None):
            application = wait_until_running(args, stop, is_ours=own is not None)
            if application is None:
                return
            wait_until_known(stop)
            stop.begin()
            say(_announcement(name, front, args, application))
            ingresses = met_ingresses()
            threading.Thread(target=watch_application, args=(stop,), daemon=True).start()
            stop.wait()
            if stop.deleted:
                return
            if not stop.lost:
                say("stopping; Ctrl-C again to stop at once")
            end_answers(ingresses, stop)


def _front(
    args: ClusterArgs, wished: WishedFront, own: FrontAddress | None
) -> tuple[FrontAddress, Future[None]]:
    """Where Serve listens, which is started where it does not run, and when it does so."""
    from cluster.ray_cluster import num_nodes, start_front
    from cluster.serve_details import front_address, serve_details

    def check(front: FrontAddress) -> None:
        keys, is_open = args.keys(os.environ), args.front.allow_unauthenticated
        check_access(keys, is_open, host=front.host, num_nodes=num_nodes())

    details = serve_details()
    if details is not None:
        front = wished.there(front_address(details))
        check(front)
        started: Future[None] = Future()
        started.set_result(None)
        return front, started
    with wished.here() if own is None else nullcontext(own) as front:
        check(front)
        started = start_front(front)
        if own is None:
            started.result()  # until then nobody else is to have its ports
    return front, started


def _announcement(
    name: str, front: FrontAddress, args: ClusterArgs, application: Mapping[str, Any]
) -> str:
    lines = told_pools(args, application)
    pools = "".join(f"  {'' if number else 'pools:':6} {one}\n" for number, one in enumerate(lines))
    model = "" if args.model == name else f"  model: {args.model}\n"
    asks_key = args.front.require_api_key or args.front.api_key_file is not None
    words = announcement(name, front.host, front.port, model + pools, asks_key=asks_key)
    if front.grpc_port is None:
        return words
    url = front_url(front.host, front.grpc_port).removeprefix("http://").removesuffix("/v1")
    return f"{words}  gRPC:  {url}, token ids in and out\n"


def _noted(args: ClusterArgs, own: FrontAddress | None) -> AbstractContextManager[None]:
    """For `kvrelay status`; whoever joins a cluster of others' knows where it is."""
    from cluster.joined_ray import address

    if own is None:
        return nullcontext()
    auth_mode = os.environ.get("RAY_AUTH_MODE", "")
    return noted(LocalCluster(os.getpid(), own.url, address(), auth_mode, args.rpc))


def _num_cpus(args: ClusterArgs) -> int:
    """As many as Ray counts for all replicas at once, old and new: on one machine they share the
    cores, and what they take is a matter of threads."""
    pools: list[Placement] = [args.prefill, args.decode, args.ingress]
    return 1 + int(sum(2 * pool.range.most * pool.num_cpus for pool in pools))
