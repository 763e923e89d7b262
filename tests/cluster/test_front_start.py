"""Serve's front, on a machine that takes its time to start it."""

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve._private import constants, node_port_manager
from ray.serve._private.node_port_manager import PortAllocator

from cluster import deployment, ray_cluster
from cluster.cluster_args import ClusterArgs
from cluster.front_address import FrontAddress
from cluster.ray_cluster import (
    _OWN_SETTINGS,
    HAPROXY_SETTINGS,
    RAYLET_SETTINGS,
    front_settings,
    start_front,
)
from engine.errors import UnavailableError
from tests.processes import ROOT

FRONT = FrontAddress("127.0.0.1", 8000)
MESSAGE = "Serve's front does not start: .* Serve's logs: /"
WHOLE_S = 60.0
QUICKEST_START_S = 4.0  # of an ingress, when another has ended


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


def test_ingresses_that_end_again_and_again_leave_a_port_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve lends one again when a front that was replaced must have ended."""
    now, kept_s = 0.0, float(HAPROXY_SETTINGS["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) + 30
    monkeypatch.setattr(node_port_manager, "RAY_SERVE_PORT_QUARANTINE_S", kept_s)
    monkeypatch.setattr(node_port_manager, "time", SimpleNamespace(monotonic=lambda: now))
    with ExitStack() as ports:
        settings = front_settings(Path("/tmp"), ports)
    first, last = (
        int(settings[f"RAY_SERVE_DIRECT_INGRESS_{end}_GRPC_PORT"]) for end in ("MIN", "MAX")
    )
    allocator = PortAllocator(first, last, "GRPC", "a node")
    while now < 2 * kept_s:
        allocator.release("an ingress", allocator.allocate("an ingress"))
        now += QUICKEST_START_S


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


def test_haproxys_file_is_written_whatever_the_locale_has(tmp_path: Path) -> None:
    """As by whoever starts HAProxy, in a locale without its letters."""
    module = "import sys; from pathlib import Path; from tests.cluster import test_open_files"
    write = f"{module}; test_open_files.front_config(Path(sys.argv[1]), 64, 1)"
    words = [sys.executable, "-c", write, str(tmp_path)]
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": _OWN_SETTINGS["PYTHONUTF8"]}
    subprocess.run(words, env={**os.environ, **locale}, cwd=ROOT, check=True, timeout=60)
    assert not (tmp_path / "haproxy.cfg").read_text("utf-8").isascii()
