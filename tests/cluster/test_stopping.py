"""Ctrl-C: the first lets answers finish or tells their clients, the second ends at once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from cluster import http_exchange
from cluster.commands import local
from cluster.commands.serve_stop import stop_signals
from cluster.front_address import listen
from cluster.http import build_app
from engine.errors import UnavailableError
from tests.cluster.conftest import make_server
from tests.cluster.fakes import ANSWER, FakeBackend, Script, say, small_model


@asynccontextmanager
async def running(script: Script) -> AsyncIterator[tuple[str, asyncio.Task[None], FakeBackend]]:
    backend = FakeBackend(script)
    app, front = build_app(backend, small_model())
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=5)
    server = local.Server(config, front, local.announcement("small", *listener.getsockname()[:2]))
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    port = listener.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1/completions", task, backend
    finally:
        listener.close()
        await asyncio.wait_for(task, 30)


def until(go_on: asyncio.Event) -> Script:
    def script(request: Any) -> Any:
        steps = say()(request)
        yield next(steps)
        yield go_on.wait()
        yield from steps

    return script


async def events_until_stop(
    url: str, go_on: asyncio.Event | None, number: signal.Signals = signal.SIGINT
) -> list[str]:
    """The lines of a stream in whose midst Ctrl-C is pressed. It goes on, if it does, when
    nothing new is taken any more."""
    body = {"prompt": "x", "stream": True, "max_tokens": 200}
    lines: list[str] = []
    async with (
        httpx.AsyncClient(timeout=10) as client,
        client.stream("POST", url, json=body) as response,
    ):
        async for line in response.aiter_lines():
            if not lines:
                os.kill(os.getpid(), number)
                await until_refused(url)
                if go_on is not None:
                    go_on.set()
            lines += [line] if line else []
    return lines


async def until_refused(url: str) -> None:
    port = httpx.URL(url).port
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            return
        writer.close()
        await asyncio.sleep(0.005)


async def test_answers_under_way_finish(capsys: pytest.CaptureFixture[str]) -> None:
    go_on = asyncio.Event()
    async with running(until(go_on)) as (url, task, _):
        lines = await events_until_stop(url, go_on)
        await asyncio.wait_for(task, 30)
        with pytest.raises(httpx.ConnectError):
            httpx.post(url, json={"prompt": "x"})
    assert lines[-1] == "data: [DONE]"
    assert ANSWER[-5:-1] in "".join(lines)
    said = capsys.readouterr().err
    assert f"small is served at {url.removesuffix('/completions')}" in said
    assert "Ctrl-C" in said


async def test_clients_are_told_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_GRACE_S", 0.1)
    async with running(until(asyncio.Event())) as (url, _, backend):
        lines = await events_until_stop(url, None)
    assert "the server is stopping" in lines[-2]
    assert lines[-1] == "data: [DONE]"
    assert backend.streams[0].num_closed


async def test_a_second_ctrl_c_does_not_wait() -> None:
    body = {"prompt": "x", "stream": True}
    async with (
        running(until(asyncio.Event())) as (url, task, _),
        httpx.AsyncClient(timeout=10) as client,
        client.stream("POST", url, json=body) as response,
    ):
        await anext(response.aiter_lines())
        os.kill(os.getpid(), signal.SIGINT)
        await until_refused(url)
        assert not task.done()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(task, 30)


HANGS = """
import os, signal, subprocess, sys, time
from cluster.commands import serve_stop

serve_stop.END_S = float(sys.argv[2])
os.environ["KVRELAY_CLUSTER"] = f"{os.getpid()} session of-a-test"
with serve_stop.stop_signals() as stop, serve_stop.ended_in_time(stop):
    subprocess.Popen(["sleep", "100"], start_new_session=True)
    # One whose environment cannot be read, as of some of Ray's.
    words = ["sh", "-c", "env -i sh -c 'echo; exec sleep 100' & wait"]
    subprocess.Popen(words, stdout=subprocess.PIPE).stdout.readline()
    for _ in range(int(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGINT)
    if sys.argv[1] == "0":
        stop.lose()
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("num_signals", "end_s", "status"), [(1, 0.1, 1), (2, 90.0, 130), (0, 90.0, 1)]
)
def test_a_cluster_that_does_not_end_is_ended(num_signals: int, end_s: float, status: int) -> None:
    """With its processes: those that it started would keep the output open. Without a signal it
    has lost its head before it served anybody, for whom there would be something to wait."""
    command = [sys.executable, "-c", HANGS, str(num_signals), str(end_s)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == status
    assert "stopped at once" in done.stderr


async def test_a_body_that_comes_after_the_stop_is_refused() -> None:
    """Its answer would be under way with nobody left to end it."""
    server, asked, go_on = make_server(), asyncio.Event(), asyncio.Event()

    async def content() -> AsyncIterator[bytes]:
        asked.set()
        await go_on.wait()
        yield json.dumps({"prompt": "x"}).encode()

    async with asyncio.timeout(20):
        request = server.client.post("/v1/completions", content=content())
        answer = asyncio.create_task(request)
        await asked.wait()
        await server.front.end_answers(0, UnavailableError("the server is stopping"))
        go_on.set()
        assert (await answer).status_code == 503
    assert not server.backend.streams


async def test_a_terminal_that_goes_is_a_stop() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        go_on = asyncio.Event()
        async with running(until(go_on)) as (url, _, _):
            assert (await events_until_stop(url, go_on, signal.SIGHUP))[-1] == "data: [DONE]"
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_goes_takes_a_cluster_along_unless_told_otherwise(
    is_ignored: bool,
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        with stop_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.wait(0) is not is_ignored
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("ends_by", ["its deadline", "a stop"])
async def test_a_client_that_reads_nothing_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """There is room for its answer's first words, and for none after them."""
    monkeypatch.setattr(http_exchange, "_LAST_WORDS_S", 0.1)
    server, is_full = make_server(), asyncio.Event()
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 200}).encode()
    unread = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if not unread:
            await asyncio.Event().wait()
        return unread.pop()

    async def send(message: Any) -> None:
        if is_full.is_set():
            await asyncio.Event().wait()
        if message["type"] == "http.response.body":
            is_full.set()

    headers = [(b"x-request-timeout", b"0.1")] if ends_by == "its deadline" else []
    scope = {
        **{"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""},
        **{"root_path": "", "headers": headers},
    }
    async with asyncio.timeout(20):
        call = asyncio.create_task(server.app(scope, receive, send))
        await is_full.wait()
        if ends_by == "a stop":
            server.front.fail_all(UnavailableError("the server is stopping"))
        await call
    assert server.backend.streams[0].num_closed


def test_a_signal_may_come_at_any_moment() -> None:
    """Also in the one in which somebody begins to wait for it, or ceases to."""
    waits = """if True:
        import random, signal
        from cluster.commands.serve_stop import Stop

        for _ in range(3000):
            stop = Stop()
            signal.signal(signal.SIGALRM, stop.note)
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-4))
            while not stop.wait(1e-5):
                pass
    """
    done = subprocess.run([sys.executable, "-c", waits], timeout=60)
    assert done.returncode == 0


def test_a_signal_ends_the_first_process_of_a_container_before_it_serves() -> None:
    waits = """if True:
        import os
        from cluster.commands.serve_stop import stop_signals

        with stop_signals(while_starting=False) as stop:
            os.system("kill -TERM 1")
            print(os.getpid(), stop.wait(0))
    """
    container = ["unshare", "--pid", "--fork", "--kill-child"]
    command = [*container, sys.executable, "-c", waits]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "1 True\n"
