"""Pages, read by Prometheus's own parser."""

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
WHOSE = ("model_name", "pool", "replica")


def read(page: bytes) -> Samples:
    """Values by name and labels, those that say whose it is apart."""
    samples: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in WHOSE}
            key = (sample.name.removeprefix("kvrelay:"), frozenset(labels.items()))
            assert key not in samples, f"{key} comes twice"
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]
