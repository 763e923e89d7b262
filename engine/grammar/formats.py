"""`format` in JSON schemas: one that JSON Schema does not define says nothing that an answer could
break, and is left out. One that it defines is kept, or refused by the library."""

import json
from typing import Any

_DEFINED = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
# Keywords whose values are schemas by names, which may be those of keywords.
BY_NAME = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)
NO_SCHEMAS = frozenset(("const", "enum", "default", "examples"))


def without_other_formats(text: str) -> str:
    """Of a schema's text; ValueError or RecursionError for what is none."""
    return json.dumps(_without(json.loads(text))) if '"format"' in text else text


def _without(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in _DEFINED:
            continue
        if key in BY_NAME and isinstance(value, dict):
            kept[key] = {name: _without(one) for name, one in value.items()}
        else:
            kept[key] = value if key in NO_SCHEMAS else _without(value)
    return kept
