"""The id of an HTTP request: its client's own, or one made here. It comes back with the answer,
whatever that is."""

from __future__ import annotations

import os
from random import Random

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"

# Seeded by the system once. Asking that for each id lets other threads take the interpreter, which
# then has to be waited for; nobody gets anything for guessing one.
_random = Random()
_draw = _random.getrandbits
os.register_at_fork(after_in_child=_random.seed)


def is_request_id(value: str) -> bool:
    return 0 < len(value) <= 128 and all(0x21 <= ord(char) <= 0x7E for char in value)


def new_request_id() -> str:
    return f"{_draw(128):032x}"


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
