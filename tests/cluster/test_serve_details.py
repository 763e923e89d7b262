"""What Serve's controller is asked, where it does not answer."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from cluster.serve_details import check_controller
from engine.errors import UnavailableError


def answer_with(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times for which it is waited."""
    waited_s: list[float] = []

    def get(question: object, timeout: float) -> None:
        assert question == "alive?"
        waited_s.append(timeout)
        if error is not None:
            raise error

    check = SimpleNamespace(remote=lambda: "alive?")
    controller = SimpleNamespace(check_alive=check)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: controller)
    monkeypatch.setattr(ray, "get", get)
    return waited_s


def test_nobody_waits_for_ever_for_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s = answer_with(GetTimeoutError(), monkeypatch)
    with pytest.raises(UnavailableError, match="controller has not answered for 2.5 s"):
        check_controller(2.5)
    assert waited_s == [2.5]


@pytest.mark.parametrize("error", [None, ActorDiedError()])
def test_one_that_answers_or_is_gone_for_good_is_no_problem(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer_with(error, monkeypatch) == []
    check_controller(2.5)


def test_where_serve_does_not_run_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_actor(name: str, namespace: str) -> None:
        raise ValueError(f"Failed to look up actor {name!r}")

    monkeypatch.setattr(ray, "get_actor", get_actor)
    check_controller(2.5)
