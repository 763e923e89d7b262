"""The HTTP application: routes, and errors in OpenAI's shape for what no route answers."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.backend import Backend
from cluster.exchange import Endpoint, Handler, HttpLimits
from cluster.front import Front
from cluster.openai.errors import ApiError
from cluster.served_model import ServedModel


def build_app(
    backend: Backend, model: ServedModel, limits: HttpLimits | None = None
) -> tuple[Starlette, Front]:
    """An ASGI application for any server, and the handlers behind it."""
    front = Front(backend, model, limits or HttpLimits())
    routes = [
        _route("POST", "/v1/completions", front.completions),
        _route("POST", "/v1/chat/completions", front.chat_completions),
        _route("POST", "/v1/embeddings", front.no_embeddings),
        _route("GET", "/v1/models", front.models),
        _route("GET", "/v1/models/{name:path}", front.model),
        _route("POST", "/tokenize", front.tokenize),
        _route("POST", "/detokenize", front.detokenize),
        _route("GET", "/health", front.health),
        _route("GET", "/ready", front.ready),
        _route("GET", "/version", front.version),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    return app, front


def _route(method: str, path: str, handler: Handler) -> Route:
    return Route(path, Endpoint(handler), methods=[method])


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    messages = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
    message = messages.get(error.status_code, str(error.detail))
    body = ApiError(error.status_code, message).body()
    return Response(body, error.status_code, error.headers, "application/json")
