"""A worker as a Ray Serve replica: Serve owns its life, its peers and ingresses talk to it on
the worker plane."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import ray
from ray import serve

from cluster.cluster_args import ClusterArgs
from cluster.commands.console import show_progress
from cluster.garbage import leave_out_what_stays
from cluster.make_worker import start_worker
from cluster.metrics.meter import labels_of, process_page
from cluster.metrics.server import MetricsServer
from cluster.metrics.worker import worker_collectors
from cluster.published import metadata_of
from cluster.ray_cluster import num_nodes
from cluster.replicas.load_meter import LoadMeter
from cluster.succession import SUCCESSION_S
from engine.errors import UnavailableError
from protos.errors import PlaneError
from protos.rpc import Plane
from protos.secret import VARIABLE
from router.workers import Leg, Worker

LOOPBACK = "127.0.0.1"
STOP_S = 10.0
# Where cores are scarce the front is served first. With Ray's own 15 it would starve workers.
NICENESS = 4


class WorkerReplica:
    """Ready when its engine is. A replica that Serve stops drains in its destructor."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, options: dict[str, Any], leg: str
    ) -> None:
        began = time.monotonic()
        leave_removed_folder()
        give_way()
        args = ClusterArgs.model_validate(options)
        show_progress(sys.__stderr__, args.log)  # Serve keeps sys.stderr for its files
        self._release = args.release
        self._drain_s = args.drain_s
        self._objectives = args.objectives
        plane = args.plane()
        host = await asyncio.to_thread(worker_host, args, plane)
        config = args.worker(Leg(leg), host)
        check_reach(plane, config.listen)

        from engine.engine import Engine

        with args.in_engine(Leg(leg)):
            engine = await asyncio.to_thread(Engine.create, config.engine)
        self._node = await start_worker(config, plane, engine)
        address = await self._node.serve()
        fingerprint = self._node.description.format.fingerprint
        self._worker = Worker(address, self._node.incarnation, fingerprint)
        self._meter = LoadMeter(config.engine.max_num_seqs, time.monotonic() - began)
        name = (*args.served_model_name, engine.info.source.name)[0]
        page = process_page(labels_of(name, leg, replica_id()), worker_collectors(self._node))
        self._metrics = MetricsServer(page.render)
        self._metrics_address = await self._metrics.start(host)
        leave_out_what_stays()

    def record_replica_metadata(self) -> dict[str, str]:
        return metadata_of(self._worker, self._release, self._metrics_address)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        report = await self._node.reporter.load()
        steps_s = self._node.engine.engine.spent_s(time.perf_counter())
        load = self._meter.read(report, steps_s, time.monotonic())
        return {**load._asdict(), **self._objectives._asdict()}

    async def check_health(self) -> None:
        if (problem := self._node.problem()) is not None:
            raise UnavailableError(problem)

    async def __del__(self) -> None:
        node = getattr(self, "_node", None)
        if node is None:
            return
        succession_s = 0.0 if node.problem() is not None else SUCCESSION_S
        async for _ in node.drain(None, self._drain_s, succession_s):
            pass
        async with asyncio.timeout(STOP_S):
            await node.stop()
        if hasattr(self, "_metrics_address"):
            await self._metrics.stop()


def replica_id() -> str:
    """As Serve tells it to those who route."""
    return str(serve.get_replica_context().replica_id.unique_id)


def worker_host(args: ClusterArgs, plane: Plane) -> str:
    """An address of this node that its peers can reach: where all of them are on it and there is no
    secret, nobody else can. Blocks while Ray's GCS is away."""
    if args.worker_host != "node":
        return args.worker_host
    return LOOPBACK if plane.secret is None and num_nodes() == 1 else node_address()


def node_address() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def check_reach(plane: Plane, listen: str) -> None:
    try:
        plane.check_listen(listen)
    except PlaneError as error:
        raise PlaneError(
            "worker_host",
            f"{listen} can be reached from other machines, which takes a cluster secret: set"
            f" {VARIABLE} on every node before `ray start`, or rpc.secret_file",
        ) from error


def leave_removed_folder() -> None:
    """The one that Ray was started in, in which torch would end this process as it is loaded."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def give_way() -> None:
    """All threads that are made from here on inherit it."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(own, NICENESS))
