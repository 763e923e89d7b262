"""How many files a process may have open. A connection takes two of them and its share of pipes in
Serve's HAProxy, and one in an ingress."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Mapping
from math import inf
from typing import Any

from engine.errors import ConfigError

logger = logging.getLogger("kvrelay.connections")

ENABLED = "RAY_SERVE_ENABLE_HA_PROXY"
CONNECTIONS, THREADS = "RAY_SERVE_HAPROXY_MAXCONN", "RAY_SERVE_HAPROXY_NBTHREAD"
# Serve's own, where the environment says nothing else.
_CONNECTIONS, _THREADS = 4096, 4
# HAProxy's: to wait and to be woken; then its listeners, logs and administration.
_OF_A_THREAD, _OTHERS = 3, 32
_ENOUGH = 1 << 16  # as much as Ray takes for the processes that it starts
_TOLD_S = 60.0


def raise_limit() -> int:
    """Of this process and those that it starts, as far as it may, since shells and systemd begin
    with 1,024. Returns the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:  # the superuser may raise that one too
        raised = max(hard, _ENOUGH)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _ENOUGH), raised))
    except ValueError:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _ENOUGH)), hard))
        return hard
    return raised


def check_front(environment: Mapping[str, str], most: int) -> None:
    """ConfigError where HAProxy would not start: it raises its own limit, as far as it may."""
    if environment.get(ENABLED) != "1":
        return
    num_connections = _number(environment, CONNECTIONS, _CONNECTIONS)
    num_threads = _number(environment, THREADS, _THREADS)
    least = _haproxy_needs(num_connections, num_threads)
    if most >= least:
        return
    fewer = _most_connections(most, num_threads)
    remedy = f"; or set {CONNECTIONS}={fewer} for fewer connections than {num_connections:,}"
    raise ConfigError(
        "open_files",
        f"this process may have {most:,} at most (ulimit -Hn) and HAProxy takes {least:,}: raise"
        " the hard limit (ulimit -n as root, docker run --ulimit nofile=65536, LimitNOFILE=65536"
        f" in a systemd unit){remedy if fewer > 0 else ''}",
    )


def _haproxy_needs(num_connections: int, num_threads: int) -> int:
    """A pipe, of two ends, for every fourth connection."""
    num_pipes = num_connections // 4
    return 2 * (num_connections + num_pipes) + _OF_A_THREAD * num_threads + _OTHERS


def _most_connections(num_files: int, num_threads: int) -> int:
    """That so many files are enough for."""
    return (num_files - _haproxy_needs(0, num_threads)) * 2 // 5


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    said = environment.get(name, str(default))
    try:
        return int(said)
    except ValueError as error:
        raise ConfigError(name, f"{said!r}, must be a number") from error


def tell_rarely(loop: asyncio.AbstractEventLoop) -> None:
    """Where no connection can be taken any more asyncio tries each second, a listener's whole
    backlog of times, and tells a traceback for each of them: thousands of lines a second."""
    told_at = -inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told_at
        error, message = context.get("exception"), context["message"]
        if isinstance(error, ValueError) and "._start_serving(" in message:
            return  # it would try again, of a listener that is closed meanwhile
        if not (isinstance(error, OSError) and message.startswith("socket.accept()")):
            loop.default_exception_handler(context)
        elif time.monotonic() >= told_at + _TOLD_S:
            told_at = time.monotonic()
            words = os.strerror(error.errno) if error.errno else str(error)
            advice = "raise the limit of open files (ulimit -n)"
            logger.error("no more clients can connect: %s; %s", words, advice)

    loop.set_exception_handler(handle)
