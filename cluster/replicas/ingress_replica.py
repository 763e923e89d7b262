"""An ingress as a Ray Serve replica: HTTP and gRPC in front of both pools. Loads neither torch nor
an engine."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from cluster.access import check_access
from cluster.api_keys import ApiKeys
from cluster.autoscaling import INGRESS
from cluster.bounded_http import bound_all
from cluster.cluster_args import ClusterArgs
from cluster.commands.console import show_progress
from cluster.front_address import check_reached
from cluster.garbage import leave_out_what_stays
from cluster.http import build_app
from cluster.http_exchange import HttpLimits
from cluster.membership import MEMBERSHIP, Replicas
from cluster.metrics.meter import Meter, RelayCollector
from cluster.metrics.server import MetricsServer
from cluster.metrics.targets import KEY as METRICS
from cluster.metrics.targets import Target
from cluster.open_files import ENABLED, raise_limit
from cluster.pools import Pools
from cluster.ray_cluster import front_host, num_nodes
from cluster.relay import Relay, RelayConfig
from cluster.replicas.access_watch import AccessWatch
from cluster.replicas.fellows import Fellows, Introduction
from cluster.replicas.load_meter import ingress_load
from cluster.replicas.token_service import TokenService, on_this_machine
from cluster.replicas.worker_replica import (
    leave_removed_folder,
    node_address,
    replica_id,
    worker_host,
)
from cluster.routing_view import routing_view
from cluster.succession import Succession
from cluster.text_side import cluster_text_side
from cluster.token_front import TokenFront
from engine.errors import UnavailableError
from router.router import Router
from router.workers import Leg


class IngressReplica(TokenService):
    """Ready when a decode worker has answered it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        options: dict[str, Any],
        decode: DeploymentHandle[Any],
        prefill: DeploymentHandle[Any] | None = None,
    ) -> None:
        began = time.monotonic()
        self._resources = AsyncExitStack()
        leave_removed_folder()
        raise_limit()
        bound_all()
        args = ClusterArgs.model_validate(options)
        show_progress(sys.__stderr__, args.log)  # Serve keeps sys.stderr for its files
        keys = args.keys(os.environ)
        host = await asyncio.to_thread(front_host)
        await asyncio.to_thread(_check_found, host)
        check = _access_check(keys, args, host)
        await asyncio.to_thread(check)
        text = await asyncio.to_thread(
            cluster_text_side, args, weights=args.engine_config.load_format != "dummy"
        )
        plane = args.plane()
        self._pools = Pools(plane, args.release, Router(args.router_config, Random()))
        self._resources.push_async_callback(self._pools.close)
        self._succession = Succession(args.release)
        # Making its routers is what a handle is for here: they tell MEMBERSHIP.
        app_name = serve.get_replica_context().app_name
        handles = (decode,) if prefill is None else (decode, prefill)
        self._handles = [handle.options(method_name="check_health") for handle in handles]
        listener = self._listener(asyncio.get_running_loop())
        self._resources.callback(MEMBERSHIP.subscribe(listener))
        asked = time.monotonic()
        limits = (await self._pools.first_description()).limits
        began += time.monotonic() - asked  # the next ingress finds workers that are there
        model = args.front.model(text.model(limits.max_model_len, limits.vocab_size))
        request_limits = args.request_limits(keys)
        config = RelayConfig(
            args.local_prefill_mode, soonest_priority=request_limits.soonest_priority
        )
        self._relay = Relay(self._pools, config)
        http = HttpLimits(args.max_body_bytes, request_timeout_s=args.request_timeout_s)
        meter = Meter(model, [RelayCollector(self._relay)])
        self._gate = args.front.gate(keys)
        self._http, self._front = build_app(
            self._relay,
            model,
            http,
            self._gate,
            request_limits,
            meter,
            lambda caller: routing_view(self._relay.router, time.monotonic(), caller),
            allowed_origins=args.front.allowed_origins,
            names_answers=False,
        )
        self._tokens = TokenFront(self._relay, model, http, self._gate, request_limits, meter)
        is_open = keys is not None or args.front.allow_unauthenticated
        self._admits = _anyone if is_open else _on_node(node_address())
        if not is_open:
            access = AccessWatch(self._gate, check)
            access.start()
            self._resources.push_async_callback(access.stop)
        own = await asyncio.to_thread(serve.get_deployment_handle, INGRESS, app_name)
        await self._show_metrics(meter, args, await asyncio.to_thread(worker_host, args, plane))
        fellows = Fellows(own, self._note_fellows)
        fellows.start()
        self._resources.push_async_callback(fellows.stop)
        self._objectives = args.objectives
        leave_out_what_stays()
        self._startup_s = time.monotonic() - began

    async def _show_metrics(self, meter: Meter, args: ClusterArgs, host: str) -> None:
        """On a port of this process's own, and of everybody on the front's."""
        page = meter.page_of(INGRESS, replica_id())
        metrics = MetricsServer(page.render)
        self._metrics_address = await metrics.start(host)
        self._resources.push_async_callback(metrics.stop)
        own = Target(INGRESS, replica_id(), self._metrics_address)
        file = None if args.metrics_targets_file is None else Path(args.metrics_targets_file)
        self._cluster, loop = meter.show_cluster(own, page, file), asyncio.get_running_loop()
        self._resources.callback(self._cluster.close)

        def listen(pool: str, replicas: Replicas) -> None:
            loop.call_soon_threadsafe(self._cluster.update, pool, replicas)

        self._resources.callback(MEMBERSHIP.subscribe(listen))

    def _note_fellows(self, known: Replicas) -> None:
        self._cluster.update(INGRESS, known)
        # One that has just begun is not yet asked, and is there all the same.
        self._gate.divide(len(known.keys() | {replica_id()}))

    def introduce(self) -> Introduction:
        """To the other ingresses."""
        return Introduction(replica_id(), {METRICS: self._metrics_address})

    def current_load(self) -> tuple[str, int, int, str]:
        """The requests that it has, of these the ones that wait for workers, and why it can answer
        none, where that is so."""
        problem = self._front.problem()
        return replica_id(), self._relay.num_open, self._relay.router.num_waiting, problem

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._http

    def record_autoscaling_stats(self) -> dict[str, float]:
        router, now = self._relay.router, time.monotonic()
        load = ingress_load(router, self._relay.num_open, self._startup_s, now)
        return {**load._asdict(), **self._objectives._asdict()}

    async def check_health(self) -> None:
        if (problem := self._pools.problem()) is not None:
            raise UnavailableError(problem)

    async def end_answers(self, grace_s: float) -> None:
        """Nothing new from here on; what is not finished after `grace_s` gets an error to read."""
        error = UnavailableError("the server is stopping")
        fronts = (self._front, self._tokens)
        await asyncio.gather(*(front.end_answers(grace_s, error) for front in fronts))

    async def __del__(self) -> None:
        """Serve awaits it, also where the start has failed."""
        await self._resources.aclose()

    def _update(self, leg: Leg, replicas: Replicas) -> None:
        self._pools.update(leg, self._succession.update(leg, replicas))

    def _listener(self, loop: asyncio.AbstractEventLoop) -> Any:
        def listen(pool: str, replicas: Replicas) -> None:
            loop.call_soon_threadsafe(self._update, Leg(pool), replicas)

        return listen


def _anyone(peer: str) -> bool:
    return True


def _on_node(address: str) -> Callable[[str], bool]:
    return lambda peer: on_this_machine(peer, address)


def _check_found(host: str) -> None:
    """By the front, whoever deploys."""
    if os.environ.get(ENABLED) == "1":
        check_reached(host)


def _access_check(keys: ApiKeys | None, args: ClusterArgs, host: str) -> Callable[[], None]:
    """For now, whoever deploys, and for later, when the cluster has grown."""
    allowed = args.front.allow_unauthenticated
    return lambda: check_access(keys, allowed, host=host, num_nodes=num_nodes())
