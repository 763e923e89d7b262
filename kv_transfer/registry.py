"""The connectors by name, in the order in which a link tries them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.connector import Connector, PoolRegion
from kv_transfer.errors import ConnectorUnavailable
from kv_transfer.faults import Faults
from kv_transfer.inprocess import InprocessConnector
from kv_transfer.nixl_connector import NixlConfig, NixlConnector
from kv_transfer.socket_connector import SocketConfig, SocketConnector

NAMES = ("inprocess", "nixl", "socket", "collective")


@dataclass(frozen=True)
class ConnectorConfig:
    """`secret`: the cluster's; two workers with different ones never exchange a byte. `socket`: of
    the collective connector's control connections too."""

    secret: bytes = b""
    nixl: NixlConfig = NixlConfig()
    socket: SocketConfig = SocketConfig()


async def open_connector(
    name: str,
    regions: Sequence[PoolRegion],
    incarnation: int,
    config: ConnectorConfig,
    faults: Faults | None = None,
) -> Connector:
    """ConnectorUnavailable where this process cannot use it; then another may do."""
    match name:
        case "inprocess":
            return InprocessConnector(regions, incarnation, config.secret)
        case "nixl":
            return await NixlConnector.open(
                regions, incarnation, config.secret, config.nixl, faults
            )
        case "socket":
            return SocketConnector(
                regions, incarnation, config.secret, config.socket, faults=faults
            )
        case "collective":
            from kv_transfer.collective_connector import CollectiveConnector  # loads torch

            return CollectiveConnector(regions, incarnation, config.secret, config.socket)
    raise ConnectorUnavailable(f"connector: {name!r}, there are {', '.join(NAMES)}")
