"""`kvrelay serve`: prefill and decode workers on a Ray cluster, behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cluster.access import check_access
from cluster.api_keys import VARIABLE
from cluster.cluster_args import ClusterArgs, Placement
from cluster.commands.console import say
from cluster.commands.engine_flags import add_engine_flags, given_knobs
from cluster.commands.front_flags import add_front_flags, given_front_flags, given_http_flags
from cluster.commands.loading import Loading, told_pools
from cluster.commands.local import announcement
from cluster.commands.plane_flags import add_plane_flags, given_plane_flags, load_plane
from cluster.commands.seen_flags import (
    add_log_flags,
    add_metrics_flags,
    given_log_flags,
    given_targets_file,
)
from cluster.commands.serve_file import ServeFile
from cluster.commands.serve_front import WishedFront
from cluster.front_address import LOOPBACK, FrontAddress, front_url
from cluster.front_news import known_ingresses
from cluster.metrics.targets import write_document
from cluster.own_processes import begin_again, kill_processes
from cluster.status.local_clusters import LocalCluster, forget, noted
from cluster.text_side import TextSide, load_text_side
from cluster.worker_config import ConnectorChoice, WorkerConfig, merged
from decode_worker.answerer import LocalPrefill
from engine.config import EngineConfig
from engine.errors import ConfigError, UnavailableError
from engine.models.describe import describe
from protos.rpc import RpcConfig
from router.workers import Leg

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

GRACE_S = 8.0  # after the first Ctrl-C, for answers under way
_LAST_WORDS_S = 2.0
_MET_S = 5.0
END_S = 12.0  # after it, for everything; what is left then takes a moment to kill
_LEAVE_S = 5.0  # after the second one, to take away what a cluster of others' has of ours
_INTERRUPTED, _LOST = 130, 1
_ADDRESS = "RAY_ADDRESS"
_AGAIN = "KVRELAY_BEGUN_AGAIN"
_POLL_S = 0.25
_KNOWN_S = 5.0  # that the front may take to know of ingresses
_WATCH_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder, Hugging Face id (default: bundled)")
    parser.add_argument("--config", metavar="FILE", help="YAML; flags win over what it says")
    parser.add_argument(
        "--check", action="store_true", help="say what a start would refuse, and start nothing"
    )
    add_front_flags(parser)
    parser.add_argument(
        "--grpc-port", type=int, metavar="N", help="also token ids by gRPC, on the same host"
    )
    pools = parser.add_argument_group("pools")
    for pool in (*Leg, "ingress"):
        pools.add_argument(f"--{pool}-replicas", metavar="N|MIN-MAX", help="default: 1")
    pools.add_argument(
        "--colocated", action="store_true", help="no prefill pool: decode workers read prompts"
    )
    pools.add_argument(
        "--local-prefill",
        choices=[mode.name.lower() for mode in LocalPrefill],
        help="whether decode workers compute prompts themselves (default: auto, where sooner)",
    )
    pools.add_argument(
        "--connector",
        choices=[str(choice) for choice in ConnectorChoice],
        help="what moves the cache (default: auto, the best that both ends have)",
    )
    pools.add_argument(
        "--drain",
        type=float,
        metavar="SECONDS",
        help="a worker that is stopped keeps for so long what another one could take"
        f" (default: {WorkerConfig.drain_s:g})",
    )
    add_plane_flags(parser)
    add_log_flags(parser)
    add_metrics_flags(parser)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    # Read when Ray is imported. Lines that differ in numbers alone are one to it, for some seconds.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    path = arguments.config
    file = ServeFile({}) if path is None else ServeFile.read(Path(path))
    args = cluster_args(arguments, file.args)
    front = args.front
    wished = WishedFront.of(arguments, file)
    host = wished.host or LOOPBACK
    check_access(front.keys(os.environ), front.allow_unauthenticated, host=host)
    if arguments.check:
        return _check(args)
    file.check_only_ours()
    with wished.here() if _starts_ray() else nullcontext() as own:
        return _run(args, wished, own)


def _check(args: ClusterArgs) -> int:
    """What takes neither weights nor other machines."""
    from engine.sizing import check_cache, decide_shape  # loads torch

    text = _text_side(args, weights=False)
    model = describe(text.source)
    for engine in _engines(args):
        check_cache(engine, decide_shape(engine, model), model)
    say(f"{', '.join(text.names)}: nothing of it is refused; nothing was started")
    return 0


def _run(args: ClusterArgs, wished: WishedFront, own: FrontAddress | None) -> int:
    """`own`: the front of a Ray cluster that is to be started; None to join one."""
    text = _text_side(args, weights=args.engine_config.load_format != "dummy")
    say("joining the Ray cluster" if own is None else "starting Ray")
    is_ours = own is not None
    with _stop_signals(while_starting=not is_ours) as stop, _ended_in_time(stop, is_ours=is_ours):
        try:
            _serve(args, wished, own, text.names[0], stop)
        except Exception:
            if not stop.lost:
                raise  # else it has been told already what everything fails without
        finally:
            if is_ours and args.metrics_targets_file is not None:
                with suppress(OSError):  # which the ingresses have told of
                    write_document(Path(args.metrics_targets_file), [])
    say("stopped")
    if stop.lost:
        os._exit(_LOST)  # Ray's way out of a process would be to wait for its head
    return _LOST if stop.deleted else 0


def _text_side(args: ClusterArgs, *, weights: bool) -> TextSide:
    """What a replica would fail on, sooner."""
    if _starts_ray():  # on a cluster of others' each machine has files of its own
        load_plane(RpcConfig(**args.rpc))
    names, template = args.served_model_name, args.front.chat_template
    text = load_text_side(args.engine_config, names, template, weights=weights)
    model = describe(text.source)
    for engine in _engines(args):
        model.length_for(engine.max_model_len)
    return text


def _engines(args: ClusterArgs) -> list[EngineConfig]:
    legs = [Leg.DECODE] if args.is_colocated else list(Leg)
    return [args.worker(leg, LOOPBACK).engine for leg in legs]


def cluster_args(arguments: argparse.Namespace, options: Mapping[str, Any]) -> ClusterArgs:
    pools = {
        pool: {"replicas": getattr(arguments, f"{pool}_replicas")} for pool in (*Leg, "ingress")
    }
    if arguments.colocated:
        if pools[Leg.PREFILL]["replicas"] is not None:
            raise ConfigError("prefill_replicas", "not with --colocated")
        pools[Leg.PREFILL]["replicas"] = 0
    given = {
        "model": arguments.model,
        "served_model_name": arguments.served_model_name,
        **given_http_flags(arguments),
        "local_prefill": arguments.local_prefill,
        "connector": arguments.connector,
        "drain_s": arguments.drain,
        "engine": given_knobs(arguments),
        "rpc": given_plane_flags(arguments),
        "front": given_front_flags(arguments),
        "log": given_log_flags(arguments),
        "metrics_targets_file": given_targets_file(arguments),
        "worker_host": "127.0.0.1" if _starts_ray() else None,
        **{pool: said for pool, said in pools.items() if said["replicas"] is not None},
    }
    if VARIABLE in os.environ:  # a cluster that we join has an environment of its own
        given["front"] = {**given["front"], "require_api_key": True}
    said = {name: value for name, value in given.items() if value is not None}
    return ClusterArgs.checked(merged(options, said))


def _starts_ray() -> bool:
    return not os.environ.get(_ADDRESS)


def _serve(
    args: ClusterArgs, wished: WishedFront, own: FrontAddress | None, name: str, stop: _Stop
) -> None:
    from cluster.deployment import deployed
    from cluster.ray_cluster import log_folder, own_ray_cluster, ray_cluster
    from cluster.replica_words import hear
    from cluster.serve_details import APP_NAME

    is_second = os.environ.pop(_AGAIN, None) is not None
    environment = {**os.environ, _AGAIN: "1"}  # as it was before a cluster was started

    def lost(how: str) -> None:
        what = f"{how}, and nothing goes on without it"
        where = f"Ray's logs: {log_folder()}"
        if not (stop.serves or is_second):
            say(f"{what}: once more from the beginning; {where}")
            begin_again(environment)
        then = "stopping; Ctrl-C to stop at once" if stop.serves else "it does not start"
        say(f"{what}: {then}; {where}")
        stop.lose()

    def cluster() -> AbstractContextManager[None]:
        if own is None:
            return ray_cluster(os.environ[_ADDRESS], say)
        return own_ray_cluster(_num_cpus(args), lost)

    with cluster():
        if own is None:
            hear(APP_NAME, say)
        front = _front(args, wished, own)
        with _noted(args, own), deployed(args, to_stay=own is not None):
            if not _wait_until_running(args, stop):
                return
            _wait_until_known(stop)
            stop.begin()
            say(_announcement(name, front, args))
            ingresses = _ingresses()
            threading.Thread(target=_watch_application, args=(stop,), daemon=True).start()
            stop.wait()
            if stop.deleted:
                return
            if not stop.lost:
                say("stopping; Ctrl-C again to stop at once")
            _end_answers(ingresses, stop)


def _front(args: ClusterArgs, wished: WishedFront, own: FrontAddress | None) -> FrontAddress:
    """Where Serve listens, which is started where it does not run."""
    from cluster.ray_cluster import num_nodes, start_front
    from cluster.serve_details import front_address, serve_details

    def check(front: FrontAddress) -> None:
        keys, is_open = args.front.keys(os.environ), args.front.allow_unauthenticated
        check_access(keys, is_open, host=front.host, num_nodes=num_nodes())

    details = serve_details()
    if details is not None:
        front = wished.there(front_address(details))
        check(front)
        return front
    with wished.here() if own is None else nullcontext(own) as front:
        check(front)
        start_front(front)
    return front


def _announcement(name: str, front: FrontAddress, args: ClusterArgs) -> str:
    from cluster.serve_details import APP_NAME, application_details

    lines = told_pools(args, application_details(APP_NAME))
    pools = "".join(f"  {'' if number else 'pools:':6} {one}\n" for number, one in enumerate(lines))
    model = "" if args.model == name else f"  model: {args.model}\n"
    asks_key = args.front.require_api_key or args.front.api_key_file is not None
    words = announcement(name, front.host, front.port, model + pools, asks_key=asks_key)
    if front.grpc_port is None:
        return words
    url = front_url(front.host, front.grpc_port).removeprefix("http://").removesuffix("/v1")
    return f"{words}  gRPC:  {url}, token ids in and out\n"


def _noted(args: ClusterArgs, own: FrontAddress | None) -> AbstractContextManager[None]:
    """For `kvrelay status`; whoever joins a cluster of others' knows where it is."""
    from cluster.joined_ray import address

    if own is None:
        return nullcontext()
    auth_mode = os.environ.get("RAY_AUTH_MODE", "")
    return noted(LocalCluster(os.getpid(), own.url, address(), auth_mode, args.rpc))


def _num_cpus(args: ClusterArgs) -> int:
    """As many as Ray counts for all replicas at once, old and new: on one machine they share the
    cores, and what they take is a matter of threads."""
    pools: list[Placement] = [args.prefill, args.decode, args.ingress]
    return 1 + int(sum(2 * pool.range.most * pool.num_cpus for pool in pools))


def _wait_until_running(args: ClusterArgs, stop: _Stop) -> bool:
    """False if the user has enough of it first."""
    from cluster.ray_cluster import nodes
    from cluster.serve_details import APP_NAME, application_details

    loading, shown = Loading(args), ""
    while not stop.wait(_POLL_S):
        application = application_details(APP_NAME)
        if application["status"] == "RUNNING":
            return True
        if application["status"] == "DEPLOY_FAILED":
            raise ConfigError("serve", _why(application))
        line = loading.line(application, nodes())
        if line != shown:
            shown = line
            say(line)
    return False


def _wait_until_known(stop: _Stop) -> None:
    """The front has all ingresses, or is not to be waited for any longer: what is asked meanwhile
    is answered, but for what comes in the moment in which it changes."""
    from cluster.serve_details import APP_NAME, application_details

    deadline = time.monotonic() + _KNOWN_S
    while time.monotonic() < deadline:
        replicas = application_details(APP_NAME)["deployments"]["ingress"]["replicas"]
        num_running = sum(replica["state"] == "RUNNING" for replica in replicas)
        known = known_ingresses(os.environ)
        if known is None or known >= num_running or stop.wait(_POLL_S / 5):
            return


def _why(application: Mapping[str, Any]) -> str:
    """Serve's own words, and what its replicas ended with: the last line of each one's error."""
    told = [
        message.strip().splitlines()[-1]
        for deployment in application["deployments"].values()
        if (message := deployment.get("message") or "").strip()
    ]
    return " ".join([application["message"], *dict.fromkeys(told)])


def _watch_application(stop: _Stop) -> None:
    """Whoever deletes it (`serve.delete`, `serve shutdown`) leaves nothing here to wait for. Looks
    twice: Serve's controller may have come back this moment."""
    from cluster.serve_details import APP_NAME, application_details

    missing = ""
    while not stop.wait(_WATCH_S):
        try:
            application_details(APP_NAME)
            missing = ""
        except UnavailableError as error:
            if missing:
                say(f"{missing}: another has deleted it, and this command ends with it")
                stop.delete()
            missing = str(error)
        except Exception:  # noqa: BLE001 - of Ray's or Serve's, which others watch over
            missing = ""


def _ingresses() -> DeploymentHandle[Any]:
    """That can be told something even when Ray has lost its head, which knows where they are."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from cluster.serve_details import APP_NAME

    handle: DeploymentHandle[Any] = serve.get_app_handle(APP_NAME)
    with suppress(TimeoutError, RayError, RayServeException):
        handle.broadcast("introduce").results(timeout_s=_MET_S, return_exceptions=True)
    return handle


def _end_answers(ingresses: DeploymentHandle[Any], stop: _Stop) -> None:
    """What is under way may go on for a while; a second signal does not wait for it."""

    def end() -> None:
        ingresses.broadcast("end_answers", GRACE_S).results(
            timeout_s=GRACE_S + _LAST_WORDS_S, return_exceptions=True
        )

    ending = threading.Thread(target=end, daemon=True)
    deadline = time.monotonic() + GRACE_S + _LAST_WORDS_S
    ending.start()
    while ending.is_alive() and not stop.again and time.monotonic() < deadline:
        time.sleep(_POLL_S / 5)


@contextmanager
def _ended_in_time(stop: _Stop, *, is_ours: bool = True) -> Iterator[None]:
    """However long Ray and Serve would take: after the second signal, or when the time since the
    first is over, whatever is left of a cluster of our own is killed, and then this process ends.
    So it is at once where nobody is served yet and Ray has lost its head: each of the steps that
    start a cluster would wait for that in its own way."""
    ended = threading.Event()

    def watch() -> None:
        stop.wait()
        at_once = stop.lost and not stop.serves
        deadline = time.monotonic() + (0 if at_once else END_S)
        while not (ended.is_set() or stop.again or time.monotonic() > deadline):
            ended.wait(_POLL_S / 5)
        if not ended.wait(0 if is_ours else _LEAVE_S * stop.again):
            _end_at_once(stop, is_ours)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _end_at_once(stop: _Stop, is_ours: bool) -> NoReturn:
    kill_processes()
    forget(os.getpid())
    left = "" if is_ours else "; `serve status` shows whether the application is there still"
    try:
        say(f"stopped at once{left}")
    finally:  # whether anybody listens or not
        os._exit(_INTERRUPTED if stop.again else _LOST)


class _Stop:
    """Signals, counted, or the loss of what the cluster cannot do without."""

    def __init__(self) -> None:
        self._first = threading.Event()
        self.again = False
        self.lost = False
        self.deleted = False  # the application, by others
        self.serves = False
        self.listen: Callable[[], None] = lambda: None  # for signals

    def begin(self) -> None:
        """Somebody is served, and is to be told when that ends."""
        self.serves = True
        self.listen()

    def note(self, *_: object) -> None:
        self.again = self._first.is_set()
        self._first.set()

    def lose(self) -> None:
        self.lost = True
        self._first.set()

    def delete(self) -> None:
        self.deleted = True
        self._first.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._first.wait(timeout_s)


@contextmanager
def _stop_signals(*, while_starting: bool = True) -> Iterator[_Stop]:
    """That the terminal is gone is one, too, but under `nohup`: HAProxy would stay.

    Without `while_starting` they end this process at once before anybody is served, and the guard
    what it has started: Ray's library has Python's threads wait for up to a quarter of a minute
    meanwhile, and no handler runs.
    """
    stop = _Stop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def listen() -> None:
        for number in numbers:
            signal.signal(number, stop.note)

    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    stop.listen = listen
    if while_starting:
        listen()
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
