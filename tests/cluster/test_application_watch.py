"""`kvrelay serve` ends when another has deleted what it serves."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

import cluster.serve_details
from cluster.commands import serve_application
from cluster.commands.serve_application import watch_application
from cluster.commands.serve_stop import Stop
from engine.errors import UnavailableError

THERE, GONE, AWAY = {"status": "RUNNING"}, UnavailableError("no application"), TimeoutError()


@pytest.mark.parametrize(
    ("answers", "num_asked"),
    [
        ([THERE, GONE, GONE], 3),
        ([GONE, THERE, GONE, GONE], 4),  # the controller had just come back
        ([GONE, AWAY, GONE, GONE], 4),
    ],
)
def test_missing_twice_is_deleted(
    answers: list[object],
    num_asked: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def details(name: str) -> object:
        asked.append(name)
        answer = answers[len(asked) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(cluster.serve_details, "application_details", details)
    monkeypatch.setattr(serve_application, "_WATCH_S", 0.001)
    stop = Stop()
    watch_application(stop)
    assert stop.deleted
    assert not stop.lost
    assert asked == ["kvrelay"] * num_asked
    assert "no application: another has deleted it" in capsys.readouterr().err


class Client:
    """Of a Serve whose controller is started anew, and is then shut down for good."""

    def __init__(self) -> None:
        self._answers = iter(
            (ActorUnavailableError("it restarts", None), ActorDiedError(), ActorDiedError())
        )

    def get_serve_details(self) -> object:
        raise next(self._answers)


def test_serve_that_was_shut_down_has_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client()
    monkeypatch.setattr(cluster.serve_details, "_get_global_client", lambda **_: client)
    monkeypatch.setattr(serve_application, "_WATCH_S", 0.001)
    stop = Stop()
    watch_application(stop)
    assert stop.deleted
    assert "Serve has no application kvrelay any more" in capsys.readouterr().err


def test_nobody_is_asked_while_it_stops() -> None:
    stop = Stop()
    stop.note()
    watch_application(stop)
    assert not stop.deleted
