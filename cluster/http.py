"""The HTTP application: routes, and errors in OpenAI's shape for what no route answers."""

import json
from collections.abc import Callable, Collection
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.backend import Backend
from cluster.front import Front
from cluster.gate import Gate
from cluster.http_exchange import Endpoint, Handler, HttpExchange, HttpLimits
from cluster.metrics.meter import Meter
from cluster.openai.errors import ApiError
from cluster.openai.openapi import document
from cluster.openai.request_limits import RequestLimits
from cluster.openai.wording import Json
from cluster.request_ids import HEADER as REQUEST_ID
from cluster.request_ids import NamedAnswers
from cluster.served_model import ServedModel
from cluster.web_pages import ANY_ORIGIN, KnownOrigins

_OTHER = "other"  # whatever no route answers, for the metrics
_FOR_PAGES = (REQUEST_ID, "retry-after", "x-should-retry")  # what scripts may read of an answer


def build_app(
    backend: Backend,
    model: ServedModel,
    limits: HttpLimits | None = None,
    gate: Gate | None = None,
    request_limits: RequestLimits | None = None,
    meter: Meter | None = None,
    routing: Callable[[str], Json] | None = None,
    *,
    allowed_origins: Collection[str] = (),
    names_answers: bool = True,
) -> tuple[Starlette, Front]:
    """An ASGI application for any server, and the handlers behind it.

    Routes are for those with a key, but for what load balancers and monitors ask. `routing`:
    what is known and was decided of the workers, where there is a choice of them, for a caller.
    `allowed_origins`: of web pages that may ask; browsers ask without a key whether theirs is one.
    `names_answers`: by their requests' ids, where nobody before it does.
    """
    gate, meter = gate or Gate(), meter or Meter(model)

    def route(method: str, path: str, handler: Handler) -> Route:
        count = partial(meter.count_answer, path.replace(":path", ""))
        return Route(path, Endpoint(handler, count), methods=[method])

    front = Front(backend, model, limits or HttpLimits(), gate, request_limits, meter)
    routes = [
        route("POST", "/v1/completions", gate.limited(front.completions)),
        route("POST", "/v1/chat/completions", gate.limited(front.chat_completions)),
        route("POST", "/v1/responses", gate.limited(front.responses)),
        route("POST", "/v1/embeddings", gate.guarded(front.no_embeddings)),
        route("GET", "/v1/models", gate.guarded(front.models)),
        route("GET", "/v1/models/{name:path}", gate.guarded(front.model)),
        route("POST", "/tokenize", gate.limited(front.tokenize)),
        route("POST", "/detokenize", gate.limited(front.detokenize)),
        route("GET", "/health", front.health),
        route("GET", "/ready", front.ready),
        route("GET", "/version", front.version),
        route("GET", "/metrics", front.metrics),
        route("GET", "/metrics/targets", front.metrics_targets),
        route("GET", "/openapi.json", _shown(lambda caller: document())),
    ]
    if routing is not None:
        routes.append(route("GET", "/debug/routing", gate.guarded(_shown(routing))))
    middleware = [Middleware(NamedAnswers)] if names_answers else []
    if allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_FOR_PAGES,
        )
        middleware.append(cors)
    if ANY_ORIGIN not in allowed_origins:
        refused = partial(meter.count_answer, _OTHER)
        middleware.append(Middleware(KnownOrigins, allowed_origins, refused))
    no_route = {HTTPException: partial(_no_route, meter)}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=no_route)
    app.router.redirect_slashes = False
    return app, front


def _shown(view: Callable[[str], Json]) -> Handler:
    """`view` of who asks."""

    async def handle(exchange: HttpExchange) -> None:
        await exchange.send_json(json.dumps(view(exchange.caller)).encode())

    return handle


async def _no_route(meter: Meter, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    meter.count_answer(_OTHER, error.status_code)
    path = request.url.path
    messages = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
    message = messages.get(error.status_code, str(error.detail))
    body = ApiError(error.status_code, message).body()
    return Response(body, error.status_code, error.headers, "application/json")
