"""Serve's front, on a machine that takes its time to start it."""

import pytest
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve._private import constants

from cluster.front_address import FrontAddress
from cluster.ray_cluster import _OWN_SETTINGS, start_front
from engine.errors import UnavailableError


def test_no_front_is_killed_that_is_still_waited_for() -> None:
    check_s = float(_OWN_SETTINGS["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"])
    given_s = check_s * constants.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD
    assert given_s >= constants.HTTP_PROXY_TIMEOUT


@pytest.mark.parametrize("error", [ActorDiedError(), TimeoutError("not available after 60s.")])
def test_a_front_that_does_not_come_is_told(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**options: object) -> None:
        raise error

    monkeypatch.setattr(serve, "start", start)
    with pytest.raises(UnavailableError, match="Serve's front does not start: .* Serve's logs: /"):
        start_front(FrontAddress("127.0.0.1", 8000))
