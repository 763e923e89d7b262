"""Ports for processes that a test starts."""

from protos.port import reserved_port


def free_port(host: str = "127.0.0.1") -> int:
    """None that the system gives out by itself, for a process that is known to nobody else."""
    with reserved_port(host) as port:
        return port
