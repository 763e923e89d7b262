"""The id of an HTTP request: its client's own, or one drawn here. It comes back with the answer,
whatever that is."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.drawn import new_request_id

HEADER = "x-request-id"


def is_request_id(value: str) -> bool:
    return 0 < len(value) <= 128 and all(0x21 <= ord(char) <= 0x7E for char in value)


class NamedAnswers:
    """Does what Serve does where it carries the requests: an id that is none comes back as well."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(HEADER)
        if request_id is None:
            request_id = new_request_id()
            made = (HEADER.encode(), request_id.encode())
            scope = {**scope, "headers": [*scope["headers"], made]}

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = (HEADER.encode(), request_id.encode("latin-1"))
                message = {**message, "headers": [*message["headers"], named]}
            await send(message)

        await self._app(scope, receive, send_named)
