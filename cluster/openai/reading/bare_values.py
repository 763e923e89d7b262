"""Arguments that a model wrote as bare text, without JSON's quotes: the tool's schema tells what
each of them is."""

from __future__ import annotations

import ast
import json
from typing import Any

_ALL = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_STRING = frozenset({"string"})
# Templates that print values by Jinja's `string` teach these.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


class BareValues:
    """Of one tool. Its schema is the client's and may be none: whatever says nothing of types
    allows all."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._known: dict[str, frozenset[str]] = {}  # types by argument

    def is_string(self, name: str) -> bool:
        """Whether the argument can be nothing else, so that any text is its value."""
        return self._types_of(name) == _STRING

    def as_json(self, name: str, text: str) -> str:
        """A value that has a type of the schema's; else a string, which is what was written."""
        value, types = _value(text), self._types_of(name)
        kind = _type_of(value)
        if kind in types or (kind == "integer" and "number" in types):
            try:
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (ValueError, TypeError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)

    def _types_of(self, name: str) -> frozenset[str]:
        if name not in self._known:
            properties = self._schema.get("properties") if isinstance(self._schema, dict) else None
            schema = properties.get(name) if isinstance(properties, dict) else None
            self._known[name] = self._allowed(schema)
        return self._known[name]

    def _allowed(self, schema: Any) -> frozenset[str]:
        """Every schema that this one may mean is looked at once: they may refer in circles."""
        waiting = [schema]
        types: set[str] = set()
        seen: set[str] = set()
        while waiting:
            match waiting.pop():
                case {"$ref": str(where)}:
                    if where not in seen:
                        seen.add(where)
                        waiting.append(self._referred(where))
                case {"type": str(kind)}:
                    types.add(kind)
                case {"type": [*kinds]}:
                    types.update(kind for kind in kinds if isinstance(kind, str))
                case {"const": value}:
                    types.add(_type_of(value))
                case {"enum": [*values]}:
                    types.update(map(_type_of, values))
                case {"anyOf": [*schemas]} | {"oneOf": [*schemas]} | {"allOf": [*schemas]}:
                    waiting += schemas
                case _:
                    return _ALL
        return frozenset(types) if types and types <= _ALL else _ALL

    def _referred(self, where: str) -> Any:
        root, *steps = where.split("/")
        schema = self._schema if root == "#" else None
        for step in steps:
            schema = schema.get(step) if isinstance(schema, dict) else None
        return schema


def _value(text: str) -> Any:
    """JSON, or Python's for what is no number; the text itself where it is neither. JSON's
    strings are text too: these models write strings without quotes."""
    bare = text.strip()
    try:
        value = json.loads(bare, strict=False)
    except (ValueError, RecursionError):
        value = _python_value(bare)
    return text if isinstance(value, str) else value


def _python_value(text: str) -> Any:
    if not text.startswith(("[", "{")):
        return _PYTHON_WORDS.get(text, text)
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case dict():
            return "object"
        case list():
            return "array"
        case _:
            return "string"
