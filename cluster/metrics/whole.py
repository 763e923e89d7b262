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
# Whether one that is leaving is still there; so many times in vain, and it is not.
LOOK_S = 5.0
MOST_MISSED = 2


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
        self._leaving: dict[Target, asyncio.Task[None]] = {}  # not named any more
        self._page_of_all: asyncio.Task[bytes] | None = None
        self._write()

    def update(self, pool: str, replicas: Replicas) -> None:
        """A replica that published no address has no page. One that is not named any more drains,
        and stays for as long as it answers."""
        before = set(self._pools.get(pool, {}).values())
        self._pools[pool] = {
            replica: Target(pool, replica, metadata[KEY])
            for replica, metadata in replicas.items()
            if isinstance(metadata.get(KEY), str) and metadata[KEY]
        }
        for target in before - self._named - self._leaving.keys():
            self._leaving[target] = asyncio.create_task(self._see_off(target))
        self._write()

    def close(self) -> None:
        for task in self._leaving.values():
            task.cancel()
        if self._page_of_all is not None:
            self._page_of_all.cancel()

    @property
    def _named(self) -> set[Target]:
        """This process is there even while nobody else has heard of it."""
        named = {target for pool in self._pools.values() for target in pool.values()}
        return named | {self._own}

    @property
    def all(self) -> list[Target]:
        return sorted(self._named | self._leaving.keys())

    def targets(self) -> list[dict[str, Any]]:
        return document(self.all)

    async def page(self) -> bytes:
        """One scrape at a time, for all who ask meanwhile: anybody may, and it costs every process
        a page."""
        if self._page_of_all is None or self._page_of_all.done():
            self._page_of_all = asyncio.create_task(self._scrape_all())
        return await asyncio.shield(self._page_of_all)

    async def _scrape_all(self) -> bytes:
        targets = self.all
        pages = await asyncio.gather(*(self._scrape(target) for target in targets))
        named = self._named
        heard = {
            target: page is not None
            for target, page in zip(targets, pages, strict=True)
            if page is not None or target in named
        }
        up = Page({"model_name": self._model_name}, [_Up(heard)]).render()
        return await asyncio.to_thread(merge, [up, *(page for page in pages if page is not None)])

    async def _scrape(self, target: Target) -> bytes | None:
        if target == self._own:
            return self._page.render()
        page = await scrape(target.address, TIMEOUT_S)
        # Another process may have the port of one that is gone.
        is_its_own = page is not None and f'replica="{target.replica}"'.encode() in page
        return page if is_its_own else None

    async def _see_off(self, target: Target) -> None:
        num_missed = 0
        while num_missed < MOST_MISSED and target not in self._named:
            num_missed = 0 if await self._scrape(target) is not None else num_missed + 1
            await asyncio.sleep(LOOK_S)
        del self._leaving[target]
        self._write()

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
