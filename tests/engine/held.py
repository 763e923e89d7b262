"""An engine that stands still, as at a long step."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.async_engine import AsyncEngine
from engine.engine import Engine


@contextmanager
def held(engine: AsyncEngine) -> Iterator[None]:
    """Its thread does nothing meanwhile, and then all that it was told at once."""
    begun, over = threading.Event(), threading.Event()

    def step(_: Engine) -> None:
        begun.set()
        assert over.wait(60)

    engine.call(step)
    assert begun.wait(60)
    try:
        yield
    finally:
        over.set()
