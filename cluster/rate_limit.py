"""How much each caller may ask for in a minute. Pure: the time is an argument, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Rates:
    """For each caller; None: as much as there is room for."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Bucket:
    """Fills steadily up to a minute's worth, and may be drawn below empty: what a request costs
    is known when it ends, and what it took too much is waited for by those after it.

    `parts`: among how many such buckets the minute's worth is divided, at present."""

    def __init__(self, per_minute: int, now: float, parts: int = 1) -> None:
        # One is sixty of as many as there are parts, so that what a second brings is a whole
        # number, and each of a changed number of parts has what it should of what was left.
        self._per_s = per_minute
        self.parts = parts
        self._level: float = self._most
        self._seen = now

    @property
    def _most(self) -> float:
        """Room for one there is in each part of the smallest of rates."""
        return max(self._per_s, self.parts) * _MINUTE_S

    def wait_s(self, amount: float, now: float) -> float:
        """Until there is so much; 0 if there is."""
        self._fill(now)
        return max(0.0, (amount * self.parts * _MINUTE_S - self._level) / self._per_s)

    def draw(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount * self.parts * _MINUTE_S

    def _fill(self, now: float) -> None:
        passed = max(0.0, now - self._seen)
        self._level = min(self._most, self._level + passed * self._per_s)
        self._seen = max(self._seen, now)


class RateLimiter:
    """Buckets by caller. There are as many callers as there are keys."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._parts = 1

    def divide(self, parts: int) -> None:
        """From now on this is one of so many limiters, each of which admits its part."""
        self._parts = parts
        for bucket in (*self._requests.values(), *self._tokens.values()):
            bucket.parts = parts

    def admit(self, caller: str, now: float) -> float:
        """0 if the request may go on, and is counted; else how many seconds are too early."""
        requests, tokens = self._requests_of(caller, now), self._tokens_of(caller, now)
        # One token: more is owed only by who has less.
        wait_s = max(
            requests.wait_s(1, now) if requests else 0.0, tokens.wait_s(1, now) if tokens else 0.0
        )
        if wait_s == 0 and requests:
            requests.draw(1, now)
        return wait_s

    def spend(self, caller: str, num_tokens: int, now: float) -> None:
        tokens = self._tokens_of(caller, now)
        if tokens:
            tokens.draw(num_tokens, now)

    def _requests_of(self, caller: str, now: float) -> Bucket | None:
        return self._of(self._requests, caller, self._rates.requests_per_minute, now)

    def _tokens_of(self, caller: str, now: float) -> Bucket | None:
        return self._of(self._tokens, caller, self._rates.tokens_per_minute, now)

    def _of(
        self, buckets: dict[str, Bucket], caller: str, per_minute: int | None, now: float
    ) -> Bucket | None:
        if per_minute is None:
            return None
        bucket = buckets.get(caller)
        if bucket is None:
            bucket = buckets[caller] = Bucket(per_minute, now, self._parts)
        return bucket
