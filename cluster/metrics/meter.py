"""All that one server measures of itself, and what it shows of that."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Metric, ProcessCollector

from cluster.backend import Backend
from cluster.metrics.families import counter, gauge, gauges, reasons
from cluster.metrics.observed import ObservedBackend
from cluster.metrics.page import Collects, Page
from cluster.metrics.record import Origin
from cluster.metrics.requests import RequestMetrics
from cluster.metrics.targets import Target
from cluster.metrics.whole import OwnPage, Pages, WholeCluster
from cluster.served_model import ServedModel
from router.admission import Refusal
from router.pairing import Reason

if TYPE_CHECKING:
    from cluster.relay import Relay


def labels_of(model_name: str, pool: str, replica: str) -> dict[str, str]:
    return {"model_name": model_name, "pool": pool, "replica": replica}


def process_page(labels: dict[str, str], collectors: Iterable[Collects]) -> Page:
    return Page(labels, [*collectors, ProcessCollector(registry=None)])


class Meter:
    """Of a server that is one process, until `show_cluster`. `others`: what is measured beside
    the requests."""

    def __init__(self, model: ServedModel, others: Iterable[Collects] = ()) -> None:
        self._model_name = model.names[0]
        self._metrics = RequestMetrics(model.max_model_len)
        self._collectors = [self._metrics.registry, *others]
        labels = labels_of(self._model_name, "local", "local")
        self.pages: Pages = OwnPage(process_page(labels, self._collectors))

    def observed(self, backend: Backend, origin: Origin) -> ObservedBackend:
        return ObservedBackend(backend, origin, self._metrics)

    def count_answer(self, path: str, status: int) -> None:
        """`path` is a route's, of which there are few, and not what a client asked for."""
        self._metrics.http.labels(path, status).inc()

    def page_of(self, pool: str, replica: str) -> Page:
        return process_page(labels_of(self._model_name, pool, replica), self._collectors)

    def show_cluster(self, own: Target, page: Page, file: Path | None) -> WholeCluster:
        """From here on the front shows every process."""
        self.pages = cluster = WholeCluster(own, page, self._model_name, file)
        return cluster


# What may become of a request's worker, by the names that `Relay.reroutes` has.
REROUTE_REASONS = ("died", "left", "refused", "stuck")


class RelayCollector:
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def collect(self) -> Iterator[Metric]:
        yield reasons(
            "reroutes",
            "Requests that went on at another worker, by what became of theirs.",
            "reason",
            self._relay.reroutes,
            REROUTE_REASONS,
        )
        router = self._relay.router
        yield gauge("router_waiting", "Requests that wait for workers.", router.num_waiting)
        backlog = router.backlog(time.monotonic())
        yield gauges(
            "router_waiting_prompt_seconds",
            "Of computing, for prompts that wait for the time of such workers.",
            ["computed_by"],
            {("prefill",): backlog.prefill_s, ("decode",): backlog.decode_s},
        )
        yield gauge(
            "router_waiting_sequences",
            "For which decode workers have no room.",
            backlog.num_sequences,
        )
        yield gauge("router_index_blocks", "Blocks of workers that are known.", len(router.index))
        yield reasons(
            "router_placements",
            "Requests that were given to workers, by why to those.",
            "reason",
            router.stats.placed,
            Reason,
        )
        yield reasons(
            "router_refusals",
            "Requests that were told to come again later.",
            "reason",
            router.stats.refused,
            Refusal,
        )
        expired = router.stats.num_expired
        yield counter("router_expired", "Requests whose time was over as they waited.", expired)
