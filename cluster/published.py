"""What a worker publishes of itself, once, through Serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cluster.metrics.targets import KEY as METRICS
from router.workers import Worker


class Published(NamedTuple):
    worker: Worker
    release: str


def read_metadata(metadata: Mapping[str, Any]) -> Published | None:
    """None for a replica that has not said who it is."""
    try:
        incarnation = int(metadata["incarnation"], 16)
        worker = Worker(metadata["address"], incarnation, metadata["fingerprint"])
        return Published(worker, metadata["release"])
    except (KeyError, TypeError, ValueError):
        return None


def metadata_of(worker: Worker, release: str, metrics: str = "") -> dict[str, str]:
    """What `read_metadata` reads, and where its metrics are; of simple types, since Serve carries
    it as JSON."""
    return {
        "address": worker.address,
        "incarnation": f"{worker.incarnation:x}",
        "fingerprint": worker.fingerprint,
        "release": release,
        METRICS: metrics,
    }
