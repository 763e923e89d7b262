"""Scripts of web pages: what a browser asks before it lets them, and what it needs of answers."""

import json
from collections.abc import Iterator

import pytest

from cluster.api_keys import VARIABLE, ApiKeys
from engine.errors import EngineError
from engine.request import GenerationRequest
from tests.cluster.conftest import Server, make_server, read_events
from tests.cluster.fakes import Step, say

KEY, PAGE = "sk-of-a-page", "https://chat.example:8443"
CHAT = "/v1/chat/completions"
ASKS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def server_for(*origins: str) -> Server:
    return make_server(keys=ApiKeys.load(None, {VARIABLE: KEY}), allowed_origins=origins)


@pytest.mark.parametrize(("origins", "allowed"), [((PAGE, "http://a"), PAGE), (("*",), "*")])
async def test_a_page_asks_as_it_may(origins: tuple[str, ...], allowed: str) -> None:
    server = server_for(*origins)
    first = await server.client.options(CHAT, headers=ASKS)
    assert first.status_code == 200, "browsers bring no key"
    assert first.headers["access-control-allow-origin"] == allowed
    assert first.headers["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]

    def failing(request: GenerationRequest) -> Iterator[Step]:
        yield next(say()(request))
        yield EngineError("the step failed")

    server.backend.script = failing
    headers = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    stream = await server.client.post(CHAT, json=body, headers=headers)
    assert "error" in read_events(stream.text)[-1]
    refused = await server.client.post(CHAT, json={}, headers=headers)
    unknown = await server.client.get(CHAT, headers={"Origin": PAGE})
    missing = await server.client.get("/nothing", headers={"Origin": PAGE})
    keyless = await server.client.get("/v1/models", headers={"Origin": PAGE})
    answers = (stream, refused, unknown, missing, keyless)
    assert [answer.status_code for answer in answers] == [200, 400, 405, 404, 401]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == allowed
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origins", [(), ("https://other.example",)])
async def test_no_other_page_is_let_in(origins: tuple[str, ...]) -> None:
    """Nor is anything done for one that has not asked beforehand, as a form need not."""
    server = server_for(*origins)
    first = await server.client.options(CHAT, headers=ASKS)
    assert first.status_code in (400, 403)
    headers = {"Origin": PAGE, "Authorization": f"Bearer {KEY}", "Content-Type": "text/plain"}
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
    answer = await server.client.post(CHAT, content=body, headers=headers)
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "origin_not_allowed"
    assert PAGE in error["message"]
    assert not server.backend.streams
    for response in (first, answer):
        assert "access-control-allow-origin" not in response.headers
