"""Which ingresses HAProxy knows. Serve tells it of one by starting it anew.

That is some tenths of a second after the application runs. Until then Serve's Python proxy hands
requests on, and one whose header is not read yet in the moment of the change gets HAProxy's 408.
"""

import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cluster.open_files import ENABLED

SOCKET = "RAY_SERVE_HAPROXY_SOCKET_PATH"  # Serve puts it into a folder of each node's there
_INGRESS = "SERVE_REPLICA_"  # what Serve's names of servers begin with that are replicas
_TIMEOUT_S = 1.0


def known_ingresses(environment: Mapping[str, str]) -> int | None:
    """By this machine's HAProxy; None where another front serves, or it is not to be asked."""
    if environment.get(ENABLED) != "1" or SOCKET not in environment:
        return None
    place = Path(environment[SOCKET])
    known: set[str] = set()
    for path in (place, *place.parent.glob(f"*/{place.name}")):
        with suppress(OSError):  # none has begun there, or it gives way to the next one
            known |= _servers(path)
    return len({name for name in known if name.startswith(_INGRESS)})


def _servers(path: Path) -> set[str]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(b"show servers state\n")
        told = b""
        while part := connection.recv(1 << 16):
            told += part
    # The version, the columns' names, and a line for each: backend's id and name, its id and name.
    return {line.split()[3] for line in told.decode().splitlines()[2:] if line.strip()}
