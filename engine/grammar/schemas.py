"""JSON schemas, and every schema that is in one."""

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

# Keywords whose values are schemas by names, which may be those of keywords.
BY_NAME = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)
NO_SCHEMAS = frozenset(("const", "enum", "default", "examples"))


def changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """A copy with `change` made to each of them, the inner ones first."""
    if isinstance(schema, list):
        return [changed(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    copy: Schema = {}
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            copy[key] = {name: changed(one, change) for name, one in value.items()}
        else:
            copy[key] = value if key in NO_SCHEMAS else changed(value, change)
    return change(copy)


def without(schema: Schema, *keywords: str) -> Schema:
    return {key: value for key, value in schema.items() if key not in keywords}
