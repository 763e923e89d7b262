"""A cluster without keys that outgrows its machine is closed until it has shrunk again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ray.exceptions import RayError

from cluster.gate import Gate
from engine.errors import ConfigError

logger = logging.getLogger("kvrelay.access")

PERIOD_S = 1.0


class AccessWatch:
    """Asks again and again what was asked at start. `check` raises ConfigError where nobody may be
    let in; it may block for as long as Ray's GCS is away. Used on one event loop."""

    def __init__(self, gate: Gate, check: Callable[[], None]) -> None:
        self._gate = gate
        self._check = check
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_asking())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_asking(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await asyncio.to_thread(self._check)
            except ConfigError as error:
                self._close(error)
            except (RayError, RuntimeError) as error:
                logger.debug("who is in the cluster is not known: %r", error)
            else:
                self._open()

    def _close(self, error: ConfigError) -> None:
        if not self._gate.closed:
            logger.error("every request is refused from now on: %s", error)
        self._gate.closed = f"requests are refused: {error}"

    def _open(self) -> None:
        if self._gate.closed:
            logger.warning("requests are answered again: the cluster is one machine")
        self._gate.closed = ""
