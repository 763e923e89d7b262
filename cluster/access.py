"""Whether those who can reach the HTTP front must show a key."""

from __future__ import annotations

import ipaddress

from cluster.api_keys import VARIABLE, ApiKeys
from engine.errors import ConfigError

_REMEDY = f"--api-key-file or {VARIABLE} asks for a key, --allow-unauthenticated for none"


def check_access(
    keys: ApiKeys | None, allow_unauthenticated: bool, *, host: str, num_nodes: int = 1
) -> None:
    """Anyone may ask on one machine's loopback; beyond it, whoever has a key."""
    if keys is not None or allow_unauthenticated:
        return
    if not _is_loopback(host):
        raise ConfigError(
            "host",
            f"{host} is beyond this machine and anyone there could use the server; {_REMEDY}",
        )
    if num_nodes > 1:
        raise ConfigError(
            "front.api_key_file",
            f"none, and the cluster has {num_nodes} nodes: anyone on any of them could use the "
            f"server; {_REMEDY}",
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
