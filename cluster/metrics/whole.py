"""The front's page: one scrape of every process there is, the same through whichever ingress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import Metric

from cluster.membership import Replicas
from cluster.metrics.families import gauges
from cluster.metrics.page import Page
from cluster.metrics.scrape import merge, scrape
from cluster.metrics.targets import KEY, Target, document, write_document

logger = logging.getLogger("kvrelay.metrics")

TIMEOUT_S = 1.0


class Pages(Protocol):
    """What the front shows of metrics."""

    async def page(self) -> bytes: ...

    def targets(self) -> list[dict[str, Any]]: ...


class OwnPage:
    """Of a server that is one process."""

    def __init__(self, page: Page) -> None:
        self._page = page

    async def page(self) -> bytes:
        return self._page.render()

    def targets(self) -> list[dict[str, Any]]:
        return []


class WholeCluster:
    """Used on one event loop, which `update` is called on with every change of who exists."""

    def __init__(self, own: Target, page: Page, model_name: str, file: Path | None) -> None:
        self._own = own
        self._page = page
        self._model_name = model_name
        self._file = file
        self._pools: dict[str, Mapping[str, Target]] = {}
        self._write()

    def update(self, pool: str, replicas: Replicas) -> None:
        """A replica that published no address has no page."""
        self._pools[pool] = {
            replica: Target(pool, replica, metadata[KEY])
            for replica, metadata in replicas.items()
            if isinstance(metadata.get(KEY), str)
        }
        self._write()

    @property
    def all(self) -> list[Target]:
        """This process is there even while nobody else has heard of it."""
        known = {target for pool in self._pools.values() for target in pool.values()}
        return sorted(known | {self._own})

    def targets(self) -> list[dict[str, Any]]:
        return document(self.all)

    async def page(self) -> bytes:
        targets = self.all
        pages = await asyncio.gather(*(self._scrape(target) for target in targets))
        heard = {target: page is not None for target, page in zip(targets, pages, strict=True)}
        up = Page({"model_name": self._model_name}, [_Up(heard)]).render()
        return await asyncio.to_thread(merge, [up, *(page for page in pages if page is not None)])

    async def _scrape(self, target: Target) -> bytes | None:
        if target == self._own:
            return self._page.render()
        return await scrape(target.address, TIMEOUT_S)

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            write_document(self._file, self.all)
        except OSError as error:
            logger.warning("the targets of metrics are not written: %s", error)


class _Up:
    def __init__(self, heard: Mapping[Target, bool]) -> None:
        self._heard = heard

    def collect(self) -> Sequence[Metric]:
        samples = {(one.pool, one.replica): float(up) for one, up in self._heard.items()}
        text = "0 of a replica whose page did not come within a second."
        return [gauges("replica_up", text, ["pool", "replica"], samples)]
