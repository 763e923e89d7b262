"""Which ingresses there are, as they say themselves.

Serve takes no router of ours for the deployment that its front leads to, so nobody tells an
ingress of the others: each asks all of them, through Serve, now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.membership import Replicas

logger = logging.getLogger("kvrelay.fellows")

METHOD = "introduce"
# Each is asked once a second by somebody, however many there are.
PERIOD_S = 1.0
ANSWER_S = 5.0


class Introduction(NamedTuple):
    replica: str
    metadata: dict[str, str]


class Fellows:
    """Used on one event loop. `publish` is called with all that answered, oneself among them."""

    def __init__(
        self, ingresses: DeploymentHandle[Any], publish: Callable[[Replicas], None]
    ) -> None:
        self._ingresses = ingresses
        self._publish = publish
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_asking())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_asking(self) -> None:
        num_asked = 1
        while True:
            try:
                num_asked = max(1, await self._ask())
            except (TimeoutError, RayError, RayServeException) as error:
                # One that is stopped: what is known stays until Serve gives it up.
                logger.debug("the ingresses are not known: %r", error)
            except Exception:  # of another version's, maybe: it goes on asking
                logger.exception("the ingresses are not known")
            await asyncio.sleep(PERIOD_S * num_asked)

    async def _ask(self) -> int:
        asked = self._ingresses.broadcast(METHOD)
        answers = await asked.results_async(timeout_s=ANSWER_S, return_exceptions=True)
        said = [Introduction(*one) for one in answers if not isinstance(one, BaseException)]
        self._publish({one.replica: one.metadata for one in said})
        return len(answers)
