from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cluster import cli
from cluster.status.local_clusters import LocalCluster, files_of, local_clusters, noted
from cluster.status.table import as_text
from cluster.status.view import Heard, IngressLoad, Status, status_of
from protos.events_pb2 import BlockCounts, LinkReport, LoadReport
from protos.rpc import Plane, RpcConfig
from protos.secret import VARIABLE

SECRET = "a secret of sixteen and more"


def cluster(pid: int, port: int = 8000, **rpc: str) -> LocalCluster:
    return LocalCluster(pid, f"http://127.0.0.1:{port}/v1", "10.0.0.1:6379", "token", rpc)


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def test_a_cluster_is_known_as_long_as_it_runs(environ: dict[str, str]) -> None:
    environ[VARIABLE] = SECRET
    folder = Path(environ["XDG_RUNTIME_DIR"]) / "kvrelay"
    with noted(cluster(os.getpid()), environ):
        (found,) = local_clusters(environ)
        assert found.ray_address == "10.0.0.1:6379"
        assert SECRET not in (folder / f"{os.getpid()}.json").read_text()
        plane = Plane.load(RpcConfig(**found.rpc), {})
        assert plane.secret is not None
        assert plane.secret.value == SECRET.encode()
        assert folder.stat().st_mode & 0o077 == 0
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    assert list(folder.iterdir()) == []
    assert local_clusters(environ) == []


def test_a_secret_file_of_the_user_s_own_is_named_and_kept(
    environ: dict[str, str], tmp_path: Path
) -> None:
    own = tmp_path / "secret"
    own.write_text(SECRET)
    environ[VARIABLE] = "another secret, which counts less"
    with noted(cluster(os.getpid(), secret_file=str(own)), environ):
        assert local_clusters(environ)[0].rpc["secret_file"] == str(own)
    assert own.read_text() == SECRET


def test_a_cluster_that_cannot_be_noted_runs_all_the_same(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "a-file"
    place.touch()
    environ["XDG_RUNTIME_DIR"] = str(place)
    with noted(cluster(os.getpid()), environ):
        assert local_clusters(environ) == []
    assert f"{place}/kvrelay'; so `kvrelay status` does not find" in caplog.text


def test_a_user_without_a_home_runs_a_cluster_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with noted(cluster(os.getpid()), {}):
        assert local_clusters({}) == []
        assert files_of(os.getpid(), {}) == ()
    assert "this user has no home; so `kvrelay status` does not find" in caplog.text


SERVER = """
import os, sys
from cluster.status.local_clusters import LocalCluster, noted
with noted(LocalCluster(int(sys.argv[1]), "http://127.0.0.1:8000/v1", "", "", {})):
    print("noted", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_server_left_behind_is_removed(environ: dict[str, str]) -> None:
    """Although another process, this one, has its number now."""
    command = [sys.executable, "-c", SERVER, str(os.getpid())]
    pipe = subprocess.PIPE
    variables = {**os.environ, **environ, VARIABLE: SECRET}
    folder = Path(environ["XDG_RUNTIME_DIR"]) / "kvrelay"
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=variables) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"noted\n"
        assert len(local_clusters(environ)) == 1
        server.kill()
    assert len(list(folder.iterdir())) == 2
    assert local_clusters(environ) == []
    assert list(folder.iterdir()) == []


def test_a_file_that_says_nothing_is_passed_over(environ: dict[str, str]) -> None:
    folder = Path(environ["XDG_RUNTIME_DIR"]) / "kvrelay"
    folder.mkdir()
    (folder / "1.json").write_text("{")
    (folder / "2.json").write_text('{"pid": 2}')
    assert local_clusters(environ) == []


def test_status_says_what_is_wrong(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def words(*flags: str) -> str:
        assert cli.main(["status", *flags]) == 2
        return capsys.readouterr().err

    assert "does not run on this machine" in words()
    with noted(cluster(os.getpid(), 8001), environ), noted(cluster(os.getppid(), 8002), environ):
        assert "port: which one? http://127.0.0.1:8001/v1, http" in words()
        assert "does not run on this machine at port 8003" in words("--port", "8003")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{nobody.getsockname()[1]}")
        assert "no Ray cluster answers at 127.0.0.1" in words()
        assert "port: is of a cluster on this machine" in words("--port", "8001")


@pytest.fixture
def watched(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., int]]:
    """`kvrelay status` of what is asked three times, and then ended by Ctrl-C."""
    asked: list[float] = []
    application = {"status": "RUNNING", "deployments": {"decode": deployment(1, replica("d1"))}}
    statuses = [
        status_of("u", "a", application, {"d1": heard}, {}, {}, {})
        for report in (REPORT, LoadReport(draining=True), REPORT)
        for heard in [Heard("10.0.0.7:500", 7, report)]
    ]

    def look() -> Status:
        return statuses[len(asked)]

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        if len(asked) == len(statuses):
            raise KeyboardInterrupt

    monkeypatch.setattr("cluster.status.gather.observed", lambda *_: nullcontext(look))
    monkeypatch.setattr("cluster.commands.status.time.sleep", sleep)

    def run(*flags: str, seconds: float) -> int:
        asked.clear()
        status = cli.main(["status", *flags])
        assert asked == [seconds] * len(statuses)
        return status

    with noted(cluster(os.getpid()), environ):
        yield run


def test_it_is_shown_again_until_the_user_has_seen_enough(
    watched: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert watched("--watch", seconds=2.0) == 130
    at = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    text = capsys.readouterr().out
    assert len(re.findall(rf"^{at}\nu  running", text, re.MULTILINE)) == 3
    assert [" draining" in one for one in re.split(at, text)[1:]] == [False, True, False]
    assert "\x1b" not in text

    assert watched("--watch", "0.5", "--json", seconds=0.5) == 130
    loads = [
        json.loads(line)["pools"][0]["replicas"][0]["load"]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [load["draining"] for load in loads] == [False, True, False]


def test_on_a_terminal_each_stands_in_the_place_of_the_one_before(
    watched: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    watched("--watch", seconds=2.0)
    text = capsys.readouterr().out
    screens = text.removesuffix("\n").split("\x1b[H")[1:]
    assert len(screens) == 3
    for screen in screens:
        *lines, last = screen.removesuffix("\n").split("\n")
        assert all(line.endswith("\x1b[K") for line in lines)
        assert last.endswith("\x1b[J")


@pytest.mark.parametrize("every", ["0", "-1", "nan", "inf", "100000"])
def test_how_often_has_bounds(every: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--watch", every]) == 2
    assert "--watch: " in capsys.readouterr().err


def deployment(target: int, *replicas: dict[str, Any], **config: Any) -> dict[str, Any]:
    return {
        "status": "UPSCALING" if target > len(replicas) else "HEALTHY",
        "message": "1 replica has not started" if target > len(replicas) else "",
        "target_num_replicas": target,
        "deployment_config": config,
        "replicas": list(replicas),
    }


def replica(name: str, state: str = "RUNNING") -> dict[str, Any]:
    return {"replica_id": name, "state": state, "node_ip": "10.0.0.7", "pid": 41}


REPORT = LoadReport(
    num_running=5,
    num_waiting=1,
    num_fetching=2,
    num_queued_tokens=1234,
    num_query_tokens=1000,
    num_hit_tokens=250,
    blocks=[BlockCounts(total=100, held=30, quarantined=5)],
    links=[
        LinkReport(peer_incarnation=9, connector="nixl", transport="ucx", bytes_per_s=3e9),
        LinkReport(peer_incarnation=0xABC, connector="socket", transport="tcp", latency_s=0.001),
    ],
)
RANGE = {"min_replicas": 1, "max_replicas": 4}
NO_RANGE = {"min_replicas": 2, "max_replicas": 2}
DECISION = {
    "least": 1,
    "most": 4,
    "target": 3,
    "num_running": 2,
    "num_reporting": 2,
    "at": 999.0,
    "why": "sequences 95%",
    "changed_at": 880.0,
    "change": "2 -> 3: sequences 95%",
}


def test_what_everybody_says_is_joined() -> None:
    application = {
        "status": "RUNNING",
        "deployments": {
            "decode": deployment(
                4, replica("d1"), replica("d2"), replica("d3"), autoscaling_config=RANGE
            ),
            "prefill": deployment(1, replica("p1")),
            "ingress": deployment(
                2, replica("i1"), replica("i2", "STARTING"), autoscaling_config=NO_RANGE
            ),
        },
    }
    heard = {
        "d1": Heard("10.0.0.7:500", 7, REPORT),
        "d2": Heard("10.0.0.8:500", 8, None),
        "d3": Heard("10.0.0.8:600", 9, None, "the secret is wrong"),
        "p1": Heard("10.0.0.9:500", 9, LoadReport(draining=True, unhealthy="stuck")),
    }
    status = status_of(
        "http://x/v1",
        "10.0.0.1:6379",
        application,
        heard,
        {"i1": IngressLoad(num_open=9, num_waiting=2)},
        {"decode": DECISION, "ingress": {**DECISION, "least": 2, "most": 2}},
        {},
    )
    decode, ingress, prefill = status.pools
    load = decode.replicas[0].load
    assert load is not None
    assert (load.kv_use, load.hit_rate) == (0.35, 0.25)
    assert [link.peer for link in load.links] == ["10.0.0.9:500", "abc"]
    assert decode.replicas[1].load is None
    assert decode.scaling is not None
    assert prefill.scaling is None
    assert prefill.replicas[0].load is not None
    assert prefill.replicas[0].load.hit_rate is None
    assert [one.state for one in ingress.replicas] == ["RUNNING", "STARTING"]

    text = as_text(status, 1000.0)
    line = {words[1]: words for row in text.splitlines() if len(words := row.split()) > 2}
    assert " ".join(line["d1"]) == "decode d1 running 10.0.0.7:500 5 3 1234 tok 35% 25%"
    assert " ".join(line["i1"]) == "ingress i1 running 10.0.0.7 pid 41 7 2"
    assert line["d2"][-3:] == ["does", "not", "answer"]
    assert " ".join(line["d3"]) == "decode d3 running 10.0.0.8:600 the secret is wrong"
    assert " ".join(line["p1"]).endswith("- draining, unhealthy: stuck")
    scaled = "1-4; 1 s ago: sequences 95%; 2 min ago: 2 -> 3: sequences 95%"
    assert f"decode   3 of 4  {scaled}  upscaling: 1 replica has not started\n" in text
    assert "\nprefill  1 of 1  fixed\n" in text
    assert text.count("fixed") == 2  # whose load Serve only tells the policy of, too
    assert "10.0.0.7:500 from 10.0.0.9:500  nixl (ucx)" in text


def test_a_range_that_nobody_scales_is_told() -> None:
    application = {
        "status": "DEPLOYING",
        "message": "wait",
        "deployments": {"decode": deployment(1, autoscaling_config=RANGE)},
    }
    text = as_text(status_of("u", "a", application, {}, {}, {}, {}), 0.0)
    assert "no policy of ours has looked at it yet" in text
    assert "wait" in text


def test_who_answers_is_told_where_serve_lists_no_pools() -> None:
    """As when a file was deployed that Serve cannot build: the replicas before it go on."""
    application = {"status": "DEPLOY_FAILED", "message": "drain_s: wrong", "deployments": {}}
    heard = {"d1": Heard("10.0.0.7:500", 7, REPORT), "d2": Heard("10.0.0.8:500", 8, None)}
    ingresses = {"i1": IngressLoad(num_open=9, num_waiting=2)}
    known = {"decode": ["d1", "d2"], "prefill": [], "ingress": ["i1"]}
    status = status_of("http://x/v1", "10.0.0.1:6379", application, heard, ingresses, {}, known)
    assert [pool.name for pool in status.pools] == ["decode", "ingress"]
    assert all(pool.target is None for pool in status.pools)
    text = as_text(status, 1000.0)
    line = {words[1]: " ".join(words) for row in text.splitlines() if len(words := row.split()) > 2}
    assert line["d1"] == "decode d1 running 10.0.0.7:500 5 3 1234 tok 35% 25%"
    assert line["d2"].endswith("does not answer")
    assert line["i1"] == "ingress i1 running 7 2"
    assert "drain_s: wrong" in text
    assert "2 known  Serve lists no pools while" in text


def test_an_application_of_which_nothing_runs_yet_has_a_status() -> None:
    application = {"status": "DEPLOYING", "deployments": {}}
    status = status_of("http://x/v1", "10.0.0.1:6379", application, {}, {}, {}, {"ingress": {}})
    assert as_text(status, 1000.0).startswith("http://x/v1  deploying  on Ray at 10.0.0.1:6379")


UP, DYING, COMING = replica("r1"), replica("r2", "STOPPING"), replica("r3", "STARTING")
CAN, CANNOT = IngressLoad(1, 0), IngressLoad(1, 1, "no prefill worker answers")


@pytest.mark.parametrize(
    ("state", "decode", "ingress", "loads", "answers"),
    [
        ("RUNNING", [UP], ["a"], [CAN], True),
        ("UNHEALTHY", [UP, DYING, COMING], ["a"], [CAN], True),
        ("DEPLOYING", [UP, COMING], ["a"], [CAN], True),
        ("DEPLOY_FAILED", [UP], ["a", "b"], [CANNOT, CAN], True),
        ("RUNNING", [UP], ["a"], [], True),
        ("UNHEALTHY", [DYING, COMING], ["a"], [CAN], False),
        ("DEPLOYING", [COMING], ["a"], [], False),
        ("DEPLOYING", [UP], [], [], False),
        ("UNHEALTHY", [UP], ["a"], [CANNOT], False),
        ("RUNNING", [UP], ["a", "b"], [CANNOT, CANNOT], False),
        ("DELETING", [UP], ["a"], [CAN], False),
    ],
)
def test_an_application_runs_while_it_can_answer(
    state: str,
    decode: list[dict[str, Any]],
    ingress: list[str],
    loads: list[IngressLoad],
    answers: bool,
) -> None:
    """Serve calls it unhealthy while it replaces one of several workers."""
    pools = {
        "decode": deployment(2, *decode),
        "ingress": deployment(1, *map(replica, ingress)),
        "prefill": deployment(1, COMING),
    }
    application = {"status": state, "deployments": pools}
    known = dict(zip(ingress, loads, strict=False))
    status = status_of("u", "a", application, {}, known, {}, {})
    assert status.answers is answers
    text = as_text(status, 0.0)
    if (state == "RUNNING") is answers:
        assert text.startswith(f"u  {state.lower()}  on Ray")
    else:
        word = "can" if answers else "cannot"
        assert text.startswith(f"u  {state.lower()}, but {word} answer  on Ray")
    assert ("no prefill worker answers" in text) is (CANNOT in loads)


def test_the_end_of_a_traceback_says_what_was_wrong() -> None:
    """Of Serve's message for a version that does not start; its first line ends with a colon."""
    failed = {
        **deployment(1, replica("d1")),
        "status": "DEPLOY_FAILED",
        "message": "failed to start. Error:\n  File 1\nConfigError: max_model_len: too long",
    }
    application = {"status": "DEPLOY_FAILED", "deployments": {"decode": failed}}
    status = status_of("http://x/v1", "10.0.0.1:6379", application, {}, {}, {}, {})
    told = "fixed  deploy_failed: failed to start. Error: ConfigError: max_model_len: too long"
    assert told in as_text(status, 1000.0)
