"""Numbers that others keep, as metric families."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from cluster.metrics.names import PREFIX
from kv_transfer.histogram import Histogram

Key = TypeVar("Key", bound=tuple[str, ...])  # label values


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value)


def gauges(
    name: str, text: str, labels: list[str], samples: Mapping[Key, float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value)


def counters(
    name: str, text: str, labels: list[str], samples: Mapping[Key, float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def reasons(
    name: str, text: str, label: str, counts: Mapping[str, float], known: Iterable[str]
) -> CounterMetricFamily:
    """Those that nothing was counted of are told as 0: of a series that begins with its first event
    Prometheus sees no increase."""
    return counters(name, text, [label], {(one,): counts.get(one, 0) for one in known})


def histograms(
    name: str, text: str, label: str, observed: Iterable[tuple[str, Histogram]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(PREFIX + name, text, labels=[label])
    for value, histogram in observed:
        family.add_metric([value], _buckets(histogram), histogram.sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    return buckets
