"""The application that `kvrelay serve` has deployed: waits until it runs, sees that it is still
there, and ends its answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cluster.autoscaling import INGRESS
from cluster.cluster_args import ClusterArgs
from cluster.commands.console import say
from cluster.commands.loading import Loading
from cluster.commands.serve_stop import Stop
from cluster.front_news import known_ingresses
from engine.errors import ConfigError, ModelError, UnavailableError
from protos.errors import PlaneError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_GRACE_S = 8.0  # after the first Ctrl-C, for answers under way
_LAST_WORDS_S = 2.0
_MET_S = 5.0
_POLL_S = 0.25
_KNOWN_S = 5.0  # that the front may take to know of ingresses
_WATCH_S = 5.0
_AWAY_S = 60.0  # that Serve's controller may be away for, as long as Ray waits for its own head
# Errors of replicas, as a traceback has them, that another try on the same machine has again.
_REFUSALS = tuple(
    f"{error.__module__}.{error.__name__}: " for error in (ConfigError, ModelError, PlaneError)
)


def wait_until_running(args: ClusterArgs, stop: Stop, *, is_ours: bool) -> Mapping[str, Any] | None:
    """What Serve says of it then; None if the user has enough of it first. ConfigError for what
    Serve gives up, and in a cluster of our own, which is one machine, for what a replica refuses:
    Serve would start it again and again. Elsewhere another node may take it."""
    from cluster.ray_cluster import nodes
    from cluster.replica_words import hush

    loading, shown = Loading(args), ""
    for application in _details(stop):
        if application["status"] == "RUNNING":
            return application
        if application["status"] == "DEPLOY_FAILED":
            raise ConfigError("serve", _why(application))
        if is_ours and (refusal := refused(application)) is not None:
            hush()
            raise refusal
        line = loading.line(application, nodes())
        if line != shown:
            shown = line
            say(line)
    return None


def _details(stop: Stop) -> Iterator[Mapping[str, Any]]:
    """What Serve says of it, again and again. UnavailableError when it has said nothing for a
    while: its controller may be away, or have come back this moment."""
    from cluster.serve_details import APP_NAME, UNREACHED, application_details

    heard = time.monotonic()
    while not stop.wait(_POLL_S):
        try:
            application = application_details(APP_NAME)
        except UnavailableError:
            if time.monotonic() > heard + _WATCH_S:
                raise
        except UNREACHED as error:
            if time.monotonic() > heard + _AWAY_S:
                raise UnavailableError(f"Serve's controller does not answer: {error}") from error
        else:
            heard = time.monotonic()
            yield application


def refused(application: Mapping[str, Any]) -> ConfigError | None:
    """What the first of its pools that refuse to start say, in their replicas' words."""
    for pool, deployment in application["deployments"].items():
        lines = (deployment.get("message") or "").splitlines()
        begins = [number for number, line in enumerate(lines) if line.startswith(_REFUSALS)]
        if begins:
            told = " ".join(line.strip() for line in lines[begins[-1] :])
            return ConfigError(pool, told.partition(": ")[2])
    return None


def _why(application: Mapping[str, Any]) -> str:
    """Serve's own words, and what its replicas ended with: the last line of each one's error."""
    told = [
        message.strip().splitlines()[-1]
        for deployment in application["deployments"].values()
        if (message := deployment.get("message") or "").strip()
    ]
    return " ".join([application["message"], *dict.fromkeys(told)])


def wait_until_known(stop: Stop) -> None:
    """The front has all ingresses, or is not to be waited for any longer: what is asked meanwhile
    is answered, but for what comes in the moment in which it changes."""
    from cluster.serve_details import APP_NAME, UNREACHED, application_details

    deadline = time.monotonic() + _KNOWN_S
    while time.monotonic() < deadline:
        with suppress(UnavailableError, *UNREACHED):
            replicas = application_details(APP_NAME)["deployments"]["ingress"]["replicas"]
            num_running = sum(replica["state"] == "RUNNING" for replica in replicas)
            known = known_ingresses(os.environ)
            if known is None or known >= num_running:
                return
        if stop.wait(_POLL_S / 5):
            return


def watch_application(stop: Stop) -> None:
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


def met_ingresses() -> DeploymentHandle[Any]:
    """That can be told something even when Ray has lost its head, which knows where they are.
    Serve's controller is not asked whether there are any: it may be away."""
    from ray import serve

    from cluster.serve_details import APP_NAME, UNREACHED

    handle: DeploymentHandle[Any]
    handle = serve.get_deployment_handle(INGRESS, APP_NAME, _check_exists=False)
    with suppress(*UNREACHED):
        handle.broadcast("introduce").results(timeout_s=_MET_S, return_exceptions=True)
    return handle


def end_answers(ingresses: DeploymentHandle[Any], stop: Stop) -> None:
    """What is under way may go on for a while; a second signal does not wait for it.
    Nobody is left to be told of an ingress that is not reached."""
    from cluster.serve_details import UNREACHED

    def end() -> None:
        with suppress(*UNREACHED):
            ingresses.broadcast("end_answers", _GRACE_S).results(
                timeout_s=_GRACE_S + _LAST_WORDS_S, return_exceptions=True
            )

    ending = threading.Thread(target=end, daemon=True)
    deadline = time.monotonic() + _GRACE_S + _LAST_WORDS_S
    ending.start()
    while ending.is_alive() and not stop.again and time.monotonic() < deadline:
        time.sleep(_POLL_S / 5)
