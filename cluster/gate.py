"""Who gets to a handler: callers with a key, as often as they may."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cluster.api_keys import ApiKeys
from cluster.exchange import Exchange, Handler
from cluster.openai.errors import ApiError
from cluster.rate_limit import RateLimiter, Rates


class Gate:
    """Without keys everybody is one caller. Belongs to one event loop."""

    def __init__(
        self,
        keys: ApiKeys | None = None,
        rates: Rates | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._limiter = RateLimiter(rates or Rates())
        self._now = now

    def guarded(self, handler: Handler) -> Handler:
        """Only with a key, where there are any."""

        async def handle(exchange: Exchange) -> None:
            exchange.caller = self._caller(exchange)
            await handler(exchange)

        return handle

    def limited(self, handler: Handler) -> Handler:
        """With a key, and counted as a request of its caller's."""

        async def handle(exchange: Exchange) -> None:
            wait_s = self._limiter.admit(exchange.caller, self._now())
            if wait_s:
                raise _too_many(wait_s)
            await handler(exchange)

        return self.guarded(handle)

    def spend(self, exchange: Exchange, num_tokens: int) -> None:
        """Counts tokens, read or written, as the caller's."""
        self._limiter.spend(exchange.caller, num_tokens, self._now())

    def _caller(self, exchange: Exchange) -> str:
        if self._keys is None:
            return ""
        authorization = exchange.header("authorization")
        key = self._keys.find(authorization)
        if key is None:
            raise _unauthorized(
                "an API key is needed: Authorization: Bearer KEY"
                if authorization is None
                else "the API key is not valid"
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
