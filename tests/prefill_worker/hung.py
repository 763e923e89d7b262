"""An engine that stands still."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.engine import Engine
from prefill_worker.node import Node


@contextmanager
def hung(node: Node) -> Iterator[None]:
    """As at a long step."""
    begun, over = threading.Event(), threading.Event()

    def step(_: Engine) -> None:
        begun.set()
        assert over.wait(30)

    node.engine.call(step)
    assert begun.wait(30)
    try:
        yield
    finally:
        over.set()
