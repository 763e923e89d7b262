"""The description of the routes, held to the routes."""

from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from cluster.openai.openapi import BODIES, document
from tests.cluster.conftest import Server
from tests.cluster.test_hostile import GOOD

NOT_SAID = {"/v1/embeddings"}  # refused, whatever is sent


def schema_of(path: str) -> dict[str, Any]:
    said = document()
    content = said["paths"][path]["post"]["requestBody"]["content"]
    return {**content["application/json"]["schema"], "components": said["components"]}


async def test_it_has_every_route(server: Server) -> None:
    routes = [route for route in server.app.routes if isinstance(route, Route)]
    there = {(route.path.replace(":path", ""), "POST" in (route.methods or ())) for route in routes}
    said = document()["paths"]
    assert {path for path, _ in there} - NOT_SAID == set(said)
    for path, is_post in there:
        assert path in NOT_SAID or list(said[path]) == (["post"] if is_post else ["get"])


async def test_anybody_can_have_it(server: Server) -> None:
    response = await server.client.get("/openapi.json")
    assert response.status_code == 200
    assert response.json() == document()


def test_it_is_made_once() -> None:
    """It takes a while, and anybody may ask for it all the time."""
    assert document() is document()


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_taken_is_described(server: Server, path: str) -> None:
    jsonschema.validate(GOOD[path], schema_of(path))
    await server.ok(path, **GOOD[path])


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/v1/completions", {"prompt": "x", "n": "2"}),
        ("/v1/completions", {"prompt": "x", "stream_options": {"unheard": 1}}),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}),
        ("/detokenize", {}),
    ],
)
async def test_what_is_refused_is_not(server: Server, path: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema_of(path))
    assert (await server.post(path, **wrong)).status_code == 400
