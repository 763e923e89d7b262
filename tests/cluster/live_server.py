"""The application behind a real socket, on an event loop of its own thread."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from cluster.http import build_app
from cluster.served_model import ServedModel
from tests.cluster.fakes import FakeBackend, small_model


@dataclass
class LiveServer:
    port: int
    backend: FakeBackend
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def live_server(model: ServedModel | None = None) -> Iterator[LiveServer]:
    backend = FakeBackend()
    app, _ = build_app(backend, model or small_model())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])))
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    try:
        yield LiveServer(listener.getsockname()[1], backend, loop)
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()
        loop.close()


def wait_until(condition: object, seconds: float) -> float:
    """How long it took; fails after `seconds`."""
    assert callable(condition)
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "did not happen in time"
        time.sleep(0.002)
    return time.monotonic() - start
