"""Who gets to a handler: callers with a key, as often as they may."""

from __future__ import annotations

import math
import time
from typing import Protocol

from cluster.api_keys import ApiKeys
from cluster.http_exchange import Handler, HttpExchange
from cluster.openai.errors import ApiError
from cluster.rate_limit import RateLimiter, Rates
from engine.errors import UnavailableError


class Asking(Protocol):
    """A request, however it came."""

    caller: str  # the name of the key that it came with

    def header(self, name: str) -> str | None: ...


class Gate:
    """Without keys everybody is one caller. Belongs to one event loop."""

    def __init__(self, keys: ApiKeys | None = None, rates: Rates | None = None) -> None:
        self._keys = keys
        self._limiter = RateLimiter(rates or Rates())
        self.closed = ""  # why nobody is let in, whatever they bring

    def guarded(self, handler: Handler) -> Handler:
        """Only with a key, where there are any."""

        async def handle(exchange: HttpExchange) -> None:
            self.enter(exchange)
            await handler(exchange)

        return handle

    def limited(self, handler: Handler) -> Handler:
        """With a key, and counted as a request of its caller's."""

        async def handle(exchange: HttpExchange) -> None:
            self.count(exchange)
            await handler(exchange)

        return self.guarded(handle)

    def divide(self, num_gates: int) -> None:
        """Rates are for all gates of a cluster together; each counts a part of them."""
        self._limiter.divide(num_gates)

    def check_open(self) -> None:
        """UnavailableError while it is closed."""
        if self.closed:
            raise UnavailableError(self.closed)

    def enter(self, asking: Asking) -> None:
        """ApiError for who has no key, where there are any; UnavailableError while it is closed."""
        self.check_open()
        asking.caller = self._caller(asking)

    def count(self, asking: Asking) -> None:
        """ApiError if it is one request of its caller's too many."""
        wait_s = self._limiter.admit(asking.caller, time.monotonic())
        if wait_s:
            raise _too_many(wait_s)

    def spend(self, asking: Asking, num_tokens: int) -> None:
        """Counts tokens, read or written, as the caller's."""
        self._limiter.spend(asking.caller, num_tokens, time.monotonic())

    def _caller(self, asking: Asking) -> str:
        if self._keys is None:
            return ""
        authorization = asking.header("authorization")
        key = self._keys.find(authorization)
        if key is None:
            is_bearer = (authorization or "").lower().startswith("bearer ")
            raise _unauthorized(
                "the API key is not valid"
                if is_bearer
                else "an API key is needed: Authorization: Bearer KEY"
            )
        return key.name


def _unauthorized(message: str) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, "authentication_error", None, "invalid_api_key", headers)


def _too_many(wait_s: float) -> ApiError:
    seconds = math.ceil(wait_s)
    message = f"this caller's rate limit is reached; there is room again in {seconds} s"
    headers = {"Retry-After": str(seconds)}
    return ApiError(429, message, "rate_limit_error", None, "rate_limit_exceeded", headers)
