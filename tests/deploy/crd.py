"""KubeRay's definition of a RayService, with no room for what it does not name."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).with_name("ray.io_rayservices.yaml.gz")  # from where: README.md
_VERSION = "v1"
_METADATA = ("name", "namespace", "labels", "annotations")


def ray_service_schema() -> dict[str, Any]:
    """As JSON Schema. Kubernetes drops fields that the definition does not name, without a word;
    here they are errors."""
    definition = yaml.load(gzip.decompress(_FILE.read_bytes()), yaml.CSafeLoader)
    (version,) = [one for one in definition["spec"]["versions"] if one["name"] == _VERSION]
    schema = version["schema"]["openAPIV3Schema"]
    names = definition["spec"]["names"]
    schema["properties"] |= {
        "apiVersion": {"const": f"{definition['spec']['group']}/{_VERSION}"},
        "kind": {"const": names["kind"]},
        # Kubernetes's own, which definitions leave out.
        "metadata": {"type": "object", "properties": dict.fromkeys(_METADATA, {})},
    }
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    _close(schema)
    return dict(schema)


def _close(schema: dict[str, Any]) -> None:
    """In place."""
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if schema.get("type") == "object" and "additionalProperties" not in schema and not is_open:
        schema["additionalProperties"] = False
    below = [*schema.get("properties", {}).values(), schema.get("items")]
    for one in [*below, schema.get("additionalProperties")]:
        if isinstance(one, dict):
            _close(one)
