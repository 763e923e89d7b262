"""A second driver: gives the running cluster other arguments, and waits until they are in force.

python -m tests.e2e.redeploy ARGUMENTS-AS-JSON, with RAY_ADDRESS set
"""

import json
import sys

import ray
from ray import serve

from cluster.app import application_of
from cluster.cluster_args import ClusterArgs
from cluster.serve_details import APP_NAME


def main() -> None:
    args = ClusterArgs.checked(json.loads(sys.argv[1]))
    ray.init(log_to_driver=False)
    serve.run_many([serve.RunTarget(application_of(args), name=APP_NAME, route_prefix="/")])


if __name__ == "__main__":
    main()
