"""The HTTP front of a relay, behind a real socket on this event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import uvicorn

from cluster.http import build_app
from cluster.relay import Relay
from tests.cluster.fakes import small_model
from tests.engine.models_on_disk import VOCAB


@asynccontextmanager
async def http_front(relay: Relay) -> AsyncIterator[httpx.AsyncClient]:
    """Prompts are token ids."""
    app, _ = build_app(relay, replace(small_model(chat=False), vocab_size=VOCAB))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.ensure_future(server.serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        yield client
    server.should_exit = True
    await serving
