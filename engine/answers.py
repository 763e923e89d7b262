"""Questions to a thread, awaited on an event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from engine.engine import Engine
from engine.errors import EngineError

Answer = TypeVar("Answer")


class Answers:
    """Those that somebody waits for; used on the event loop's thread only."""

    def __init__(self) -> None:
        self._awaited: set[asyncio.Future[Any]] = set()

    def ask(
        self,
        question: Callable[[Engine], Answer],
        call: Callable[[Callable[[Engine], None]], None],
        on_loop: Callable[[Callable[[], None]], None],
        on_lost: Callable[[Answer], None],
    ) -> Awaitable[Answer]:
        """`call` carries the question to the thread, `on_loop` brings the answer back; `on_lost`
        gets one that nobody waits for any more. An EngineError is an answer too."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)

        def resolve(answer: Answer) -> None:
            if future.done():
                on_lost(answer)
            else:
                future.set_result(answer)

        def command(engine: Engine) -> None:
            try:
                answer = question(engine)
            except EngineError as error:
                on_loop(partial(_refuse, future, error))
            else:
                on_loop(partial(resolve, answer))

        call(command)
        return future

    def fail_all(self, error: EngineError) -> None:
        for future in list(self._awaited):
            _refuse(future, error)


def _refuse(future: asyncio.Future[Any], error: EngineError) -> None:
    if not future.done():
        future.set_exception(error)
