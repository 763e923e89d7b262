"""Scripts of web pages: which may ask. A browser names the page's origin with what they send."""

from collections.abc import Callable, Collection

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.openai.errors import ApiError

ANY_ORIGIN = "*"
_STATUS = 403


class KnownOrigins:
    """Refuses what other pages ask. A browser only keeps the answer from them: what it may send
    without a question beforehand would be carried out."""

    def __init__(
        self, app: ASGIApp, origins: Collection[str], count_refused: Callable[[int], None]
    ) -> None:
        self._app = app
        self._origins = origins
        self._count_refused = count_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = _origin(scope) if scope["type"] == "http" else None
        if origin is None or origin in self._origins:
            await self._app(scope, receive, send)
            return
        self._count_refused(_STATUS)
        message = f"pages of {origin} may not ask: --allowed-origins names whose may"
        error = ApiError(_STATUS, message, code="origin_not_allowed")
        await Response(error.body(), _STATUS, media_type="application/json")(scope, receive, send)


def _origin(scope: Scope) -> str | None:
    """Of every request: looked for without what reads headers for whom they matter."""
    for name, value in scope["headers"]:
        if name == b"origin":
            return bytes(value).decode("latin-1")
    return None
