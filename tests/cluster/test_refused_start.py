"""A start that every try of a replica's would fail in the same way is not tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray._private.ray_logging import global_worker_stdstream_dispatcher

import cluster.ray_cluster
import cluster.serve_details
from cluster.cluster_args import ClusterArgs
from cluster.commands import serve_application
from cluster.commands.serve_application import wait_until_running
from cluster.commands.serve_stop import Stop
from engine.errors import ConfigError

SERVE_S = """A replica failed to start with exception. Retrying 2 more time(s). Error:
ray::ServeReplica:kvrelay:decode.initialize_and_get_metadata() (pid=1654, ip=192.0.2.2)
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "cluster/replicas/worker_replica.py", line 58, in __init__
    engine = await asyncio.to_thread(Engine.create, config.engine)
  File "engine/memory.py", line 77, in plan_cache
    raise ConfigError("max_model_len", problem)
"""
REFUSED = "engine.errors.ConfigError: max_model_len: a sequence of 2048 tokens needs 6.1 MiB"
BROKEN = "engine.errors.ModelError: model.safetensors: is cut off"
NO_SECRET = "protos.errors.PlaneError: worker_host: can be reached,\nwhich takes a secret"
CRASHED = "RuntimeError: the device went away"


def deployed(status: str, message: str = "") -> dict[str, Any]:
    replicas = [{"replica_id": "r", "state": "STARTING", "node_id": "n"}]
    decode = {"message": message, "replicas": replicas}
    ingress = {"message": "", "replicas": replicas}
    return {
        "status": status,
        "message": "Failed to update",
        "deployments": {"ingress": ingress, "decode": decode},
    }


Start = Callable[..., object]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """With what Serve says, one after the other."""

    def begin(*said: dict[str, Any], is_ours: bool) -> object:
        left = iter(said)
        monkeypatch.setattr(cluster.serve_details, "application_details", lambda _: next(left))
        monkeypatch.setattr(cluster.ray_cluster, "nodes", dict)
        monkeypatch.setattr(serve_application, "_POLL_S", 0.001)
        return wait_until_running(ClusterArgs(), Stop(), is_ours=is_ours)

    return begin


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (REFUSED, "decode: max_model_len: a sequence of 2048 tokens needs 6.1 MiB"),
        (BROKEN, "decode: model.safetensors: is cut off"),
        (NO_SECRET, "decode: worker_host: can be reached, which takes a secret"),
    ],
)
def test_what_a_replica_refuses_ends_the_start_at_once_and_is_told_once(
    start: Start, error: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[object] = []
    global_worker_stdstream_dispatcher.add_handler("ray_print_logs", heard.append)
    first = deployed("DEPLOYING")
    with pytest.raises(ConfigError) as caught:
        start(first, deployed("DEPLOYING", SERVE_S + error), is_ours=True)
    assert str(caught.value) == told
    assert capsys.readouterr().err == "ingress: 1 starting; decode: 1 starting\n"
    global_worker_stdstream_dispatcher.emit("of a traceback")  # type: ignore[no-untyped-call]
    assert not heard


def test_another_try_may_help_with_what_is_no_refusal(start: Start) -> None:
    assert start(
        deployed("DEPLOYING", SERVE_S + CRASHED),
        deployed("DEPLOYING", f"{SERVE_S}{CRASHED}, not engine.errors.ConfigError: x: y"),
        deployed("RUNNING"),
        is_ours=True,
    )


def test_another_node_of_a_cluster_may_take_it(start: Start) -> None:
    refused = deployed("DEPLOYING", SERVE_S + REFUSED)
    assert start(refused, deployed("RUNNING"), is_ours=False)
    failed = deployed("DEPLOY_FAILED", SERVE_S + REFUSED)
    with pytest.raises(ConfigError, match="serve: Failed to update engine.errors.ConfigError"):
        start(refused, failed, is_ours=False)
