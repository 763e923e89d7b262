"""One process's metrics as text, every sample with the labels that say whose it is."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Collects(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class Page(Collector):
    """Times of creation are left out: nobody asks for them, and they take as many lines as the
    counters."""

    def __init__(self, labels: Mapping[str, str], collectors: Iterable[Collects]) -> None:
        self._labels = dict(labels)
        self._collectors = tuple(collectors)

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            for metric in collector.collect():
                yield self._labelled(metric)

    def render(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[Metric]:
        """Names are not looked for when the page is registered, which is for one rendering."""
        return []

    def _labelled(self, metric: Metric) -> Metric:
        whose = Metric(metric.name, metric.documentation, metric.type, metric.unit)
        whose.samples = [
            sample._replace(labels={**self._labels, **sample.labels})
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]
        return whose
