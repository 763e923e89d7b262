"""A port of a process's own, where its page can be had."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from cluster.bounded_http import BoundedHttp
from cluster.metrics.page import CONTENT_TYPE
from protos.address import Address

PATH = "/metrics"
_MAX_CONNECTIONS = 32
_IDLE_S = 75
_STOP_S = 1


class MetricsServer:
    """Started and stopped on the event loop that `render` is to be called on."""

    def __init__(self, render: Callable[[], bytes]) -> None:
        self._render = render

    async def start(self, host: str) -> str:
        """The address at which the page is."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # sends at once
        listener.bind((host, 0))
        address = str(Address(host, listener.getsockname()[1]))
        self._server = _Server(
            uvicorn.Config(
                self._app,
                interface="asgi3",
                lifespan="off",
                proxy_headers=False,
                access_log=False,
                log_config=None,
                server_header=False,
                http=BoundedHttp,
                limit_concurrency=_MAX_CONNECTIONS,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_STOP_S,
            )
        )
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return address

    async def stop(self) -> None:
        self._server.should_exit = True
        await asyncio.wait([self._task])

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status, body = 404, b"the page is at /metrics\n"
        if scope["path"] == PATH and scope["method"] in ("GET", "HEAD"):
            status, body = 200, self._render()
        headers = [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": body})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are the process's business."""
        yield
