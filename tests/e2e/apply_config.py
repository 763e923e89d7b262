"""A second driver: gives Serve a config file as `serve deploy` does, but without the dashboard that
this takes, and says what became of the application, as JSON.

python -m tests.e2e.apply_config CONFIG-AS-JSON, with RAY_ADDRESS set

A config without applications is what to change in the one that runs.
"""

import json
import sys
import time
from typing import Any

import ray
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from cluster.serve_details import APP_NAME, application_details, serve_details

PAUSE_S = 0.1


def main() -> None:
    config: dict[str, Any] = json.loads(sys.argv[1])
    ray.init(log_to_driver=False)
    if "applications" not in config:
        told = serve_details()
        assert told is not None
        running = told["applications"][APP_NAME]["deployed_app_config"]
        config = {"applications": [{**running, **config}]}
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate(config))
    while (details := application_details(APP_NAME))["status"] == "DEPLOYING":
        time.sleep(PAUSE_S)
    sys.stdout.write(json.dumps({"status": details["status"], "message": details["message"]}))


if __name__ == "__main__":
    main()
