"""How the application gets to Serve: as an object, or as the config file that users deploy."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.schema import ServeDeploySchema

from cluster.app import APP_NAME, IMPORT_PATH, SCALING_POLICY, build
from cluster.cluster_args import ClusterArgs


def deploy(args: ClusterArgs) -> None:
    """Returns before the application runs. A policy for all pools together can be given in a
    config alone; Serve builds such an application in a process of its own, which takes longer."""
    if not args.is_scaled:
        application = serve.RunTarget(target=build(args), name=APP_NAME, route_prefix="/")
        serve.run_many([application], wait_for_applications_running=False)
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
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "autoscaling_policy": {"policy_function": SCALING_POLICY},
        "args": args.model_dump(mode="json"),
    }
    return {"applications": [application]}
