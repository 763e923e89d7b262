"""A worker, made from what its user said. Importing this module loads no engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cluster.worker_config import ConnectorChoice, WorkerConfig, WorkerRole
from engine.errors import ConfigError
from protos.rpc import Plane

if TYPE_CHECKING:
    from engine.engine import Engine
    from prefill_worker.node import Node, NodeConfig

logger = logging.getLogger(__name__)

_LEAST_CONNECTIONS = 256


async def start_worker(config: WorkerConfig, plane: Plane, engine: Engine) -> Node:
    """Everything but its server; ConfigError where its connectors cannot be had."""
    from kv_transfer.errors import ConnectorUnavailable

    try:
        worker = _make(config, plane, engine)
        await worker.start()
    except ConnectorUnavailable as error:
        raise ConfigError("connector", str(error)) from error
    return worker


def _make(config: WorkerConfig, plane: Plane, engine: Engine) -> Node:
    from decode_worker.worker import DecodeWorker
    from prefill_worker.node import Node

    workers = {WorkerRole.PREFILL: Node, WorkerRole.DECODE: DecodeWorker}
    return workers[config.role](node_config(config, plane), engine)


def node_config(config: WorkerConfig, plane: Plane) -> NodeConfig:
    from kv_transfer.nixl_connector import NixlConfig
    from kv_transfer.registry import ConnectorConfig
    from kv_transfer.socket_connector import SocketConfig
    from kv_transfer.socket_server import ServerLimits
    from kv_transfer.socket_tls import SocketTls
    from prefill_worker.node import NodeConfig
    from protos.worker_pb2 import ROLE_DECODE, ROLE_PREFILL

    rpc, tls = config.rpc, None
    if rpc.tls_certificate is not None and rpc.tls_key is not None:
        tls = SocketTls.load(
            rpc.tls_certificate, rpc.tls_key, rpc.tls_authority, rpc.tls_server_name
        )
    # Two of each peer's stay, whether it reads or not.
    limits = ServerLimits(max_connections=max(_LEAST_CONNECTIONS, 2 * config.exchange.max_leases))
    socket = SocketConfig(config.host, config.data_port, config.advertise, tls=tls, limits=limits)
    secret = b"" if plane.secret is None else plane.secret.value
    both = (ConnectorChoice.NIXL, ConnectorChoice.SOCKET)
    auto = config.connector is ConnectorChoice.AUTO
    # To other hosts nixl sends what it reads as it is; who chooses it by name may.
    nixl = NixlConfig(beyond_host=tls is None or not auto)
    if tls is not None and not auto and config.connector is ConnectorChoice.NIXL:
        logger.warning("nixl encrypts nothing: between hosts the caches of prompts are readable")
    return NodeConfig(
        listen=config.listen,
        advertise=config.advertise,
        role=ROLE_PREFILL if config.role is WorkerRole.PREFILL else ROLE_DECODE,
        max_num_seqs=config.engine.max_num_seqs,
        connectors=tuple(map(str, both if auto else (config.connector,))),
        connector=ConnectorConfig(secret=secret, nixl=nixl, socket=socket),
        exchange=config.exchange,
        stall_timeout_s=config.engine.stall_timeout_s,
        plane=plane,
    )
