"""The routes as an OpenAPI document, made of the types that bodies are read by.

For clients' tools and for fuzzing. What the types cannot say (which values go together, what the
model knows) is a 400 or a 422 of the server's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from cluster.openai.body import Body
from cluster.openai.chat_request import ChatRequest
from cluster.openai.completion_request import CompletionRequest
from cluster.openai.responses.request import ResponsesRequest
from cluster.openai.token_requests import DetokenizeRequest, TokenizeRequest
from protos.version import version

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
GUARDED = ("/v1/models", "/v1/models/{name}")
OPEN = ("/health", "/ready", "/version", "/metrics", "/metrics/targets", "/openapi.json")
_KEY = {"key": {"type": "http", "scheme": "bearer"}}
_REFS = "#/components/schemas/{model}"


@cache  # it takes some 50 ms, and who asks needs no key
def document() -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    paths = {path: {"post": _post(kind, schemas)} for path, kind in BODIES.items()}
    paths |= {path: {"get": _get(path)} for path in (*GUARDED, *OPEN)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": version()},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _KEY},
    }


def _post(kind: type[Body], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template=_REFS)
    schemas |= schema.pop("$defs", {})
    schemas[kind.__name__] = schema
    content = {"application/json": {"schema": {"$ref": _REFS.format(model=kind.__name__)}}}
    return {
        "requestBody": {"required": True, "content": content},
        "responses": _responses(),
        "security": [{"key": []}, {}],
    }


def _get(path: str) -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "parameters": [name] if "{name}" in path else [],
        "responses": _responses(),
        "security": [{"key": []}, {}] if path in GUARDED else [],
    }


def _responses() -> dict[str, Any]:
    return {"200": {"description": "done"}, "default": {"description": "an error, as OpenAI's"}}
