"""A Ray cluster that somebody else has started."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.job_config import JobConfig

from engine.errors import ConfigError, UnavailableError
from protos.address import Address
from protos.errors import PlaneError

CLIENT = "ray://"  # before the address of Ray's client server
_CONNECT_S = 2.0
_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # so many, to Ray's clients of it
_REACH_S = 2.0  # between two looks at its head
_MISSES = 2


@contextmanager
def joined(ray_address: str, **options: Any) -> Iterator[None]:
    """UnavailableError where nobody answers, long before Ray gives up: it tries for minutes, in
    which it takes no signal."""
    check_reachable(ray_address)
    try:
        with _one_attempt():
            init_ray(address=ray_address, log_to_driver=False, **options)
    except (ValueError, ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        reason = str(error).splitlines()[0]
        raise UnavailableError(
            f"no Ray cluster can be joined at {ray_address}: {reason}; the port is the `--port` of"
            " `ray start --head`, and where a token is asked for, RAY_AUTH_MODE=token and"
            " ~/.ray/auth_token bring it"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _one_attempt() -> Iterator[None]:
    """Ray makes twenty, of which each takes 40 s where something else listens."""
    given = os.environ.get(_ATTEMPTS)
    os.environ.setdefault(_ATTEMPTS, "1")
    try:
        yield
    finally:
        if given is None:
            del os.environ[_ATTEMPTS]


def address() -> str:
    """Of the cluster that this process has joined."""
    return str(ray.get_runtime_context().gcs_address)


class _OwnPath(list[str]):
    """Where a job's processes look for modules before all else. Ray adds the folder that the
    command runs in, and with it somebody's `engine.py` would stand for our package."""

    def extend(self, folders: Iterable[str]) -> None:
        here, ours = os.getcwd(), str(Path(__file__).parents[1])
        super().extend(folder for folder in folders if folder != here or here == ours)


def init_ray(address: str | None = None, **options: Any) -> None:
    """Ray takes SIGTERM for itself, in Python and then in C++, where it would end the process with
    all that is under way; it is given back."""
    if not (address or "").startswith(CLIENT):  # whose job is the server's
        options["job_config"] = job = JobConfig()
        job._py_driver_sys_path = _OwnPath()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **options)
    finally:
        signal.signal(signal.SIGTERM, before)


def check_reachable(ray_address: str) -> None:
    if ray_address == "auto":
        return  # Ray knows where, on this machine
    try:
        address = Address.parse(ray_address.removeprefix(CLIENT))
    except PlaneError as error:
        message = f"{ray_address}, must be the HOST:PORT of Ray's head, like 192.0.2.1:6379"
        raise ConfigError("RAY_ADDRESS", message) from error
    try:
        with socket.create_connection((address.host, address.port), _CONNECT_S):
            pass
    except OSError as error:
        raise UnavailableError(f"no Ray cluster answers at {ray_address}: {error}") from error


class ReachWatch:
    """Says when a head cannot be reached, and when it can again. What becomes of the cluster is
    for whoever started it: a head may come back with what it knew."""

    def __init__(self, ray_address: str, say: Callable[[str], None]) -> None:
        self._address = ray_address
        self._say = say
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        num_misses = 0
        while not self._stopped.wait(_REACH_S):
            try:
                check_reachable(self._address)
            except UnavailableError as error:
                num_misses += 1
                if num_misses == _MISSES:
                    self._say(
                        f"{error}; if its head does not come back within a minute, Ray ends what"
                        " runs there, and this command, too"
                    )
            else:
                if num_misses >= _MISSES:
                    self._say(f"the Ray cluster at {self._address} answers again")
                num_misses = 0
