"""`kvrelay worker`: one leg of the relay, until it is told to end."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.console import answer, say, show_progress
from cluster.commands.engine_flags import add_engine_flags, given_knobs
from cluster.commands.plane_flags import add_plane_flags, given_plane_flags
from cluster.commands.seen_flags import add_log_flags
from cluster.commands.signals import ending_signals
from cluster.garbage import leave_out_what_stays
from cluster.log_format import LogArgs
from cluster.make_worker import start_worker
from cluster.metrics.meter import labels_of, process_page
from cluster.metrics.server import PATH, MetricsServer
from cluster.metrics.worker import worker_collectors
from cluster.worker_config import (
    ConnectorChoice,
    WorkerConfig,
    WorkerRole,
    in_engine,
    in_rpc,
    merged,
    plane_of,
    read_options,
)
from protos.address import Address
from protos.port import claimed
from protos.rpc import Plane

if TYPE_CHECKING:
    from engine.engine import Engine
    from prefill_worker.node import Node


STOP_S = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="folder, Hugging Face id (default: the file's, or bundled)"
    )
    worker = parser.add_argument_group("worker")
    worker.add_argument("--config", metavar="FILE", help="YAML; flags win over what it says")
    worker.add_argument("--role", choices=[str(role) for role in WorkerRole])
    worker.add_argument("--listen", metavar="HOST:PORT", help="port 0: any that is free")
    worker.add_argument(
        "--connector",
        choices=[str(choice) for choice in ConnectorChoice],
        help="what moves the cache (default: auto, the best that both ends have)",
    )
    worker.add_argument(
        "--data-port",
        type=int,
        metavar="N",
        help="of the socket and collective connectors (default: any)",
    )
    worker.add_argument("--advertise", metavar="HOST", help="how peers reach this machine")
    worker.add_argument(
        "--drain",
        type=float,
        metavar="SECONDS",
        help=f"for requests under way, when it is to end (default: {WorkerConfig.drain_s:g})",
    )
    add_plane_flags(parser)
    add_log_flags(parser, of_requests=False)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    config = worker_config(arguments)
    plane = plane_of(config.rpc)
    # Before the model, so that an address in use is told at once.
    with claimed_ports(config, plane):
        show_progress(log=LogArgs(format=arguments.log_format or "text"))

        from engine.engine import Engine

        with in_engine():
            engine = Engine.create(config.engine)
        asyncio.run(_serve(config, plane, engine))
    say("stopped")
    return 0


@contextmanager
def claimed_ports(config: WorkerConfig, plane: Plane) -> Iterator[None]:
    """ConfigError where one of them cannot be had."""
    with ExitStack() as claims:
        with in_rpc():
            claims.enter_context(claimed(plane.check_listen(config.listen), "listen"))
            if config.data_port and config.connector is not ConnectorChoice.NIXL:
                data = Address(config.host, config.data_port)
                claims.enter_context(claimed(data, "data_port"))
        yield


def worker_config(arguments: argparse.Namespace) -> WorkerConfig:
    options: dict[str, Any] = {}
    if arguments.config is not None:
        options = read_options(Path(arguments.config))
    given = {
        "role": arguments.role,
        "listen": arguments.listen,
        "connector": arguments.connector,
        "data_port": arguments.data_port,
        "advertise": arguments.advertise,
        "drain_s": arguments.drain,
    }
    engine = given_knobs(arguments)
    if arguments.model is not None:
        engine["model"] = arguments.model
    flags = {name: value for name, value in given.items() if value is not None}
    inner = {"rpc": given_plane_flags(arguments), "engine": engine}
    return WorkerConfig.from_mapping(merged(options, {**flags, **inner}))


async def _serve(config: WorkerConfig, plane: Plane, engine: Engine) -> None:
    worker = await start_worker(config, plane, engine)
    try:
        with in_rpc():
            address = await worker.serve()
        labels = labels_of(engine.info.source.name, config.role, address)
        metrics = MetricsServer(process_page(labels, worker_collectors(worker)).render)
        say(f"metrics at http://{await metrics.start(config.host)}{PATH}")
        try:
            leave_out_what_stays()
            answer(f"{config.role} worker at {address}")
            await _until_drained(worker, config.drain_s)
        finally:
            await metrics.stop()
    finally:
        await _stop(worker)


async def _stop(worker: Node) -> None:
    try:
        async with asyncio.timeout(STOP_S):
            await worker.stop()
    except TimeoutError:
        say(f"the engine has not ended its step for {STOP_S:g} s; ending without it")
        os._exit(1)


async def _until_drained(worker: Node, drain_s: float) -> None:
    """The first signal lets what runs go on for a while; the second one ends it."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in ending_signals():
        loop.add_signal_handler(number, signals.put_nowait, number)
    await signals.get()
    say(f"draining, for {drain_s:g} s at most; again to stop at once")
    drain = asyncio.create_task(_drain(worker, drain_s))
    again = asyncio.create_task(signals.get())
    done, waiting = await asyncio.wait([drain, again], return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    for task in done:
        task.result()


async def _drain(worker: Node, drain_s: float) -> None:
    async for _ in worker.drain(drain_s):
        pass
