"""Serve's front, on a machine that takes its time to start it."""

import threading
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve._private import constants

from cluster import deployment, ray_cluster
from cluster.cluster_args import ClusterArgs
from cluster.front_address import FrontAddress
from cluster.ray_cluster import _OWN_SETTINGS, RAYLET_SETTINGS, start_front
from engine.errors import UnavailableError

FRONT = FrontAddress("127.0.0.1", 8000)
MESSAGE = "Serve's front does not start: .* Serve's logs: /"
WHOLE_S = 60.0


def test_no_front_is_killed_that_is_still_waited_for() -> None:
    check_s = float(_OWN_SETTINGS["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"])
    given_s = check_s * constants.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD
    assert given_s >= constants.HTTP_PROXY_TIMEOUT


def test_ray_s_processes_fill_no_disk_with_statistics() -> None:
    """They pass over a setting that they do not know."""
    name = "RAY_event_stats_print_interval_ms"
    assert float(RAYLET_SETTINGS[name]) >= 3600e3
    raylet = Path(ray.__file__).with_name("core") / "src/ray/raylet/raylet"
    assert name.encode() in raylet.read_bytes()


@pytest.mark.parametrize("error", [ActorDiedError(), TimeoutError("not available after 60s.")])
def test_a_front_that_does_not_come_is_told(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its controller does meanwhile."""
    was_looked_for = threading.Event()

    def start(**options: object) -> None:
        assert was_looked_for.wait(WHOLE_S)
        raise error

    def serve_details() -> None:
        was_looked_for.set()
        raise ActorDiedError

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(ray_cluster, "serve_details", serve_details)
    with pytest.raises(UnavailableError, match=MESSAGE):
        start_front(FRONT)


@pytest.mark.parametrize("waits", [False, True])
def test_an_application_is_deployed_while_the_front_starts(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And waits for it; Serve's own words for one that does not come would blame its controller."""
    is_deployed = threading.Event()

    def start(**options: object) -> None:
        assert is_deployed.wait(WHOLE_S)
        raise ActorDiedError

    def deploy(_: ClusterArgs) -> None:
        is_deployed.set()
        if waits:
            assert isinstance(started.exception(WHOLE_S), UnavailableError)
            raise TimeoutError("Proxies not available after 60s.")

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(deployment, "deploy", deploy)
    for module in (ray_cluster, deployment):
        monkeypatch.setattr(module, "serve_details", lambda: {"applications": {}})
    started = start_front(FRONT)
    with pytest.raises(UnavailableError, match=MESSAGE):
        deployment.deployed(ClusterArgs(), started, to_stay=False).__enter__()
