"""The Ray Serve application: `import_path: cluster.app:build` of a Serve config file."""

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException

from cluster.autoscaling import INGRESS
from cluster.cluster_args import ClusterArgs, Placement
from cluster.replica_watch import ReplicaWatch
from cluster.replicas.ingress_replica import IngressReplica
from cluster.replicas.worker_replica import WorkerReplica
from cluster.succession import SUCCESSION_S
from engine.errors import ConfigError
from router.workers import Leg

IMPORT_PATH = "cluster.app:build"
SCALING_POLICY = "cluster.autoscaling:scale"
# Beyond the longest request: a replica that is stopped ends by itself, sooner or later.
_SHUTDOWN_MARGIN_S = 60.0
_DRAIN_LOOP_S = 0.1
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 5.0
_METRICS_PERIOD_S, _LOOK_BACK_S = 1.0, 5.0
_MANY = 1_000_000  # requests at once in one ingress: what bounds them is the workers' queues


def build(options: dict[str, Any]) -> serve.Application:
    """What Serve calls with the `args` of a config file, in a process of its own. It tells an error
    of its own kind as it is; after any other it tries three times more, in a process for each."""
    try:
        return application_of(ClusterArgs.checked(options))
    except ConfigError as error:
        raise RayServeException(str(error)) from error


def application_of(args: ClusterArgs) -> serve.Application:
    """ConfigError for what Ray would refuse of where replicas are to run."""
    options = args.model_dump(mode="json")
    decode = _worker_pool(args, Leg.DECODE, args.decode).bind(options, Leg.DECODE.value)
    pools = [decode]
    if not args.is_colocated:
        pools.append(_worker_pool(args, Leg.PREFILL, args.prefill).bind(options, Leg.PREFILL.value))
    options_of_ingress = _options(args, args.ingress, is_heard=args.is_scaled)
    replica = serve.ingress()(IngressReplica)
    ingress = _deployment(replica, INGRESS, max_ongoing_requests=_MANY, **options_of_ingress)
    return ingress.bind(options, *pools)


def shutdown_limit_s(args: ClusterArgs) -> float:
    """How long a replica that is stopped may take: whatever it answers ends sooner."""
    return SUCCESSION_S + args.request_timeout_s + args.drain_s + _SHUTDOWN_MARGIN_S


def _worker_pool(args: ClusterArgs, leg: Leg, placement: Placement) -> serve.Deployment:
    watch = RequestRouterConfig(request_router_class=ReplicaWatch)  # type: ignore[arg-type]
    return _deployment(
        WorkerReplica, leg.value, request_router_config=watch, **_options(args, placement)
    )


def _deployment(replica: type, pool: str, **options: Any) -> serve.Deployment:
    try:
        return serve.deployment(name=pool, **options)(replica)
    except ValueError as error:  # Ray's words for labels and amounts that it does not take
        raise ConfigError(pool, str(error)) from error


def _options(args: ClusterArgs, placement: Placement, is_heard: bool = False) -> dict[str, Any]:
    """`is_heard`: the policy is to know its load, though there are always as many."""
    actor: dict[str, Any] = {"num_cpus": placement.num_cpus, "num_gpus": placement.num_gpus}
    if placement.resources:
        actor["resources"] = placement.resources
    if placement.label_selector:
        actor["label_selector"] = placement.label_selector
    options: dict[str, Any] = {
        "ray_actor_options": actor,
        "graceful_shutdown_timeout_s": shutdown_limit_s(args),
        "graceful_shutdown_wait_loop_s": _DRAIN_LOOP_S,
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "max_surge_percent": 100,  # the new ones are there before the old ones stop
    }
    if placement.range.is_scaled or is_heard:
        options["autoscaling_config"] = _scaling(placement)
    else:
        options["num_replicas"] = placement.range.least
    if placement.max_replicas_per_node is not None:
        options["max_replicas_per_node"] = placement.max_replicas_per_node
    return options


def _scaling(placement: Placement) -> dict[str, Any]:
    """Bounds alone: the application's policy decides, and knows its own delays."""
    return {
        "min_replicas": placement.range.least,
        "max_replicas": placement.range.most,
        "metrics_interval_s": _METRICS_PERIOD_S,
        "look_back_period_s": _LOOK_BACK_S,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
    }
