import functools
import json
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from cluster.api_keys import ApiKeys
from cluster.front import Front
from cluster.gate import Gate
from cluster.http import build_app
from cluster.http_exchange import HttpLimits
from cluster.openai.request_limits import RequestLimits
from cluster.rate_limit import Rates
from cluster.served_model import ServedModel
from tests.cluster.fake_fleet import fleet as fleet
from tests.cluster.fake_fleet import make_fleet as make_fleet
from tests.cluster.fakes import FakeBackend, Script, small_model


@dataclass
class Server:
    """The application without a socket."""

    client: httpx.AsyncClient
    backend: FakeBackend
    front: Front
    model: ServedModel
    app: Starlette
    gate: Gate

    async def post(self, path: str, /, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def ok(self, path: str, /, **body: Any) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def events(self, path: str, /, **body: Any) -> list[dict[str, Any]]:
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        return read_events(response.text)


def read_events(text: str) -> list[dict[str, Any]]:
    """The JSON of each event; the last one must be [DONE]."""
    assert text.endswith("\n\n")
    frames = text.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def make_server(
    script: Script | None = None,
    model: ServedModel | None = None,
    limits: HttpLimits | None = None,
    *,
    keys: ApiKeys | None = None,
    rates: Rates | None = None,
    request_limits: RequestLimits | None = None,
    allowed_origins: Collection[str] = (),
) -> Server:
    backend, model = FakeBackend(script), model or small_model()
    gate = Gate(keys, rates)
    app, front = build_app(
        backend, model, limits, gate, request_limits, allowed_origins=allowed_origins
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    client = httpx.AsyncClient(transport=transport, base_url="http://test")
    return Server(client, backend, front, model, app, gate)


@functools.cache
def lasting(keys: ApiKeys | None = None) -> Server:
    """One for everything that is sent, so that each request meets what those before it left."""
    return make_server(keys=keys)


def check_left(server: Server) -> None:
    """Of what was sent nothing is left running at the engine."""
    assert all(stream.num_closed for stream in server.backend.streams)
    server.backend.streams.clear()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = make_server()
    async with server.client:
        yield server
        # Whatever was asked, nothing is left running at the engine.
        assert all(stream.num_closed for stream in server.backend.streams)
