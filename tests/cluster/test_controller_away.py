"""Serve's controller is away, or Ray's head: a start goes on when it is back, and a stop ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray.serve.api
from ray.exceptions import ActorUnavailableError, RayError
from ray.serve.exceptions import RayServeException

import cluster.ray_cluster
import cluster.serve_details
import cluster.status.gather
from cluster import deployment
from cluster.cluster_args import ClusterArgs
from cluster.commands import serve_application
from cluster.commands.serve_application import (
    end_answers,
    met_ingresses,
    wait_until_known,
    wait_until_running,
)
from cluster.commands.serve_stop import Stop
from cluster.status.gather import observed
from engine.errors import UnavailableError

MISSING = UnavailableError("Serve has no application kvrelay any more")
AWAY = ActorUnavailableError("it restarts", None)
RUNNING = [{"state": "RUNNING"}, {"state": "RUNNING"}]


def details(status: str) -> dict[str, Any]:
    return {"status": status, "message": "", "deployments": {"ingress": {"replicas": RUNNING}}}


Tell = Callable[..., list[object]]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """What Serve says, one after the other, and the last for ever; the list has what it said."""

    def begin(*answers: object) -> list[object]:
        left, said = chain(answers, repeat(answers[-1])), []

        def application_details(_: str) -> object:
            said.append(answer := next(left))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(cluster.serve_details, "application_details", application_details)
        return said

    monkeypatch.setattr(cluster.ray_cluster, "nodes", dict)
    monkeypatch.setattr(serve_application, "_POLL_S", 0.001)
    return begin


@pytest.mark.parametrize("error", [MISSING, AWAY, TimeoutError(), RayServeException("x")])
def test_a_controller_that_comes_back_ends_no_start(tell: Tell, error: Exception) -> None:
    answers = [error, details("DEPLOYING"), error, error, details("RUNNING")]
    said = tell(*answers)
    assert wait_until_running(ClusterArgs(), Stop(), is_ours=True) == details("RUNNING")
    assert said == answers


@pytest.mark.parametrize(
    ("error", "limit", "told"),
    [
        (MISSING, "_WATCH_S", "Serve has no application kvrelay any more"),
        (AWAY, "_AWAY_S", "Serve's controller does not answer: "),
    ],
)
def test_one_that_stays_away_does(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, error: Exception, limit: str, told: str
) -> None:
    said = tell(details("DEPLOYING"), error)
    # Whose time passes with every answer.
    monkeypatch.setattr(serve_application, "time", SimpleNamespace(monotonic=lambda: len(said)))
    monkeypatch.setattr(serve_application, limit, 2.5)
    with pytest.raises(UnavailableError, match=told):
        wait_until_running(ClusterArgs(), Stop(), is_ours=True)
    assert len(said) == 1 + 3


@pytest.mark.parametrize("error", [MISSING, AWAY])
def test_the_front_is_waited_for_all_the_same(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    known = iter([1, 2])
    monkeypatch.setattr(serve_application, "known_ingresses", lambda _: next(known))
    said = tell(error, details("RUNNING"), error, details("RUNNING"))
    wait_until_known(Stop())
    assert len(said) == 4
    assert next(known, None) is None


class Ingresses:
    """Of a cluster without its head; `when` one asks them, or waits for what they say."""

    def __init__(self, when: str, error: Exception) -> None:
        self._when, self._error = when, error
        self.asked: list[str] = []

    def broadcast(self, name: str, *_: float) -> Ingresses:
        return self._called("broadcast")

    def results(self, *, timeout_s: float, return_exceptions: bool) -> Ingresses:
        return self._called("results")

    def _called(self, name: str) -> Ingresses:
        self.asked.append(name)
        if name == self._when:
            raise self._error
        return self


@pytest.mark.parametrize("when", ["broadcast", "results"])
@pytest.mark.parametrize("error", [TimeoutError("x"), RayError("x"), RayServeException("x")])
def test_ingresses_that_are_not_reached_leave_no_traceback(
    when: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracebacks: list[object] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    ingresses = Ingresses(when, error)
    end_answers(cast(Any, ingresses), Stop())
    assert ingresses.asked[-1] == when
    assert not tracebacks


class Client:
    """Of a Serve whose controller is away."""

    def __init__(self) -> None:
        self.ingresses = Ingresses("results", AWAY)

    @property
    def _controller(self) -> object:
        raise AWAY

    def get_handle(self, name: str, app: str, *, check_exists: bool) -> Ingresses:
        assert (name, app, check_exists) == ("ingress", "kvrelay", False)
        return self.ingresses


def test_ingresses_are_known_without_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(ray.serve.api, "_get_global_client", lambda: client)
    assert cast(object, met_ingresses()) is client.ingresses
    assert client.ingresses.asked == ["broadcast", "results"]


@pytest.mark.parametrize("num_answers", [0, 1])
def test_one_that_is_lost_in_a_deployment_is_told(
    num_answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[dict[str, Any]] = [{}] * num_answers

    def serve_details() -> object:
        if answers:
            return answers.pop()
        raise AWAY

    monkeypatch.setattr(deployment, "serve_details", serve_details)
    monkeypatch.setattr(deployment, "deploy", lambda _: None)
    front: Future[None] = Future()
    front.set_result(None)
    with pytest.raises(UnavailableError, match="not said that kvrelay is deployed: .*restarts"):
        deployment.deployed(ClusterArgs(), front, to_stay=False).__enter__()
    assert not answers


@pytest.mark.parametrize("error", [AWAY, RayServeException("There is no Serve instance running")])
def test_a_status_of_what_goes_meanwhile_says_so(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(*_: object) -> None:
        raise error

    told: dict[str, Any] = {"deployments": {}}
    monkeypatch.setattr(cluster.status.gather, "joined", lambda *_, **__: nullcontext())
    monkeypatch.setattr(cluster.status.gather, "_details", lambda _: ({}, told))
    monkeypatch.setattr("cluster.status.gather.serve.get_deployment_handle", handle)
    with (
        pytest.raises(UnavailableError, match=f"^the cluster at here:1 has not .*: {error}"),
        observed("here:1", cast(Any, None), "") as look,
    ):
        look()
