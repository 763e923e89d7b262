"""How the application gets to Serve, as an object or as the config file that users deploy, and how
it goes again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.schema import ServeDeploySchema

from cluster.app import IMPORT_PATH, SCALING_POLICY, application_of
from cluster.cluster_args import ClusterArgs
from cluster.serve_details import APP_NAME, UNREACHED, serve_details
from engine.errors import ConfigError, UnavailableError

logger = logging.getLogger("kvrelay.deployment")

_ROUTE = "/"
# A line for every call, those of ingresses to each other among them; `log.requests` has one for
# each request, where it is wanted.
_LOGGING = {"enable_access_log": False}


@contextmanager
def deployed(args: ClusterArgs, front: Future[None], *, to_stay: bool) -> Iterator[None]:
    """For as long as the block runs, or until Serve itself ends. What others have deployed stays,
    in our application's place, too: ConfigError where there is no room for ours. UnavailableError
    where Serve's controller is lost meanwhile, or `front` does not start."""
    try:
        check_room(args, serve_details() or {})
        deploy(args)
        front.result()
        # None of an application that was deployed as an object.
        ours = (_application() or {}).get("deployed_app_config")
    except RayTaskError as error:
        raise UnavailableError(f"Serve does not deploy {APP_NAME}: {error.cause}") from error
    except UNREACHED as error:
        if front.done():
            front.result()  # Serve waits for it, too, and would blame its controller
        reason = str(error).splitlines()[0]
        message = f"Serve's controller has not said that {APP_NAME} is deployed: {reason}"
        raise UnavailableError(message) from error
    try:
        yield
    finally:
        if not to_stay:
            _delete(ours)


def check_room(args: ClusterArgs, details: Mapping[str, Any]) -> None:
    """`details` are Serve's."""
    applications = details.get("applications", {})
    if APP_NAME in applications:
        state = str(applications[APP_NAME]["status"]).lower()
        raise ConfigError(
            "RAY_ADDRESS",
            f"the application {APP_NAME} is on that Ray cluster already ({state}), and stays as it"
            " is; `kvrelay status` shows it, `serve deploy` changes it",
        )
    for name, other in applications.items():
        if other.get("route_prefix") == _ROUTE:
            message = f"the application {name} has the route {_ROUTE} of that Ray cluster's front"
            raise ConfigError("RAY_ADDRESS", message)
    of_files = [name for name, one in applications.items() if one.get("source") == "declarative"]
    if args.is_scaled and of_files:
        raise ConfigError(
            "replicas",
            "a range is deployed as a file is, and with it Serve would delete what other files"
            f" have deployed there: {', '.join(of_files)}; say a number, or put both into one file",
        )


def _application() -> dict[str, Any] | None:
    application: dict[str, Any] | None
    application = (serve_details() or {"applications": {}})["applications"].get(APP_NAME)
    return application


def _delete(ours: Any) -> None:
    try:
        application = _application()
        if application is None:
            return  # somebody has deleted it
        if application.get("deployed_app_config") != ours:
            logger.warning("another has deployed %s since, which stays", APP_NAME)
            return
        serve.delete(APP_NAME)
    except TimeoutError:
        logger.warning("%s is being deleted, and takes its time", APP_NAME)
    except RayError as error:
        logger.warning("%s may be there still: %s", APP_NAME, error)


def deploy(args: ClusterArgs) -> None:
    """Returns before the application runs. A policy for all pools together can be given in a
    config alone; Serve builds such an application in a process of its own, which takes longer."""
    if not args.is_scaled:
        target = serve.RunTarget(
            application_of(args), name=APP_NAME, route_prefix=_ROUTE, logging_config=_LOGGING
        )
        serve.run_many([target], wait_for_applications_running=False)
        return
    # As `serve run` does; the REST interface would take a dashboard and its ten processes.
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "Serve has been started"
    client.deploy_apps(ServeDeploySchema.model_validate(serve_config(args)))


def serve_config(args: ClusterArgs) -> dict[str, Any]:
    """What `serve deploy` would take, without the front's address."""
    application = {
        "name": APP_NAME,
        "route_prefix": _ROUTE,
        "import_path": IMPORT_PATH,
        "logging_config": _LOGGING,
        "autoscaling_policy": {"policy_function": SCALING_POLICY},
        "args": args.model_dump(mode="json"),
    }
    return {"applications": [application]}
