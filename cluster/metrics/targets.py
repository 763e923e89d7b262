"""Where every process's page is: Prometheus's service-discovery document, by HTTP and as a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

# A replica's metadata has the address of its page under this name.
KEY = "metrics"


class Target(NamedTuple):
    pool: str
    replica: str
    address: str


def document(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """Meta labels alone: the pages say themselves whose they are."""
    return [
        {
            "targets": [target.address],
            "labels": {
                "__meta_kvrelay_pool": target.pool,
                "__meta_kvrelay_replica": target.replica,
            },
        }
        for target in targets
    ]


def write_document(path: Path, targets: Iterable[Target]) -> None:
    """Readers see the old one or the new one. OSError where it cannot be written."""
    text = json.dumps(document(targets), indent=2) + "\n"
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):  # or each process would leave one there, on a disk that is full
            fresh.unlink(missing_ok=True)
        raise
