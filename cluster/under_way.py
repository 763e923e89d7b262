"""The answers that a front has under way, and their end when it stops."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from engine.errors import EngineError

# A request ends itself when its time is over; what is still there then is ended from outside.
OVERTIME_S = 0.25
LEAST_S = 0.001  # that one is given, whose time was over before it began


class UnderWay:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._fail: dict[object, Callable[[EngineError], None]] = {}
        self._none = asyncio.Event()
        self._none.set()
        self._refusal: EngineError | None = None

    def check_goes_on(self) -> None:
        """To be asked again right before an answer begins: nobody would end it after `end`."""
        if self._refusal is not None:
            raise self._refusal

    @contextmanager
    def answering(self, fail: Callable[[EngineError], None]) -> Iterator[None]:
        """`fail` ends it soon, with an error that its client gets to read."""
        key = object()
        self._fail[key] = fail
        self._none.clear()
        try:
            yield
        finally:
            del self._fail[key]
            if not self._fail:
                self._none.set()

    async def end(self, grace_s: float, error: EngineError) -> None:
        """Refuses what is new; what is under way may go on for a while, and then fails."""
        self._refusal = error
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._none.wait()
        self.fail_all(error)
        await self._none.wait()

    def fail_all(self, error: EngineError) -> None:
        for fail in list(self._fail.values()):
            fail(error)
