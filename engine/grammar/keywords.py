"""Keywords of JSON schemas that the library lacks: some can be said in others that it has, the rest
only be left out, where an answer may break them."""

import json
import re
from collections.abc import Sequence
from typing import Any

from engine.grammar.formats import LACKING, without_other_format
from engine.grammar.schemas import Schema, changed, without

_RESTATED = ('"format"', '"propertyNames"', '"uniqueItems"')  # as a text has them
_ANNOTATIONS = ("$comment", "description", "title")
# More fits where one of these is not said, and they say nothing of what others mean.
_LACKING = (
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
    *("unevaluatedProperties", "not", "if", "then", "else"),
)
# Look-around, word boundaries and back references.
_LACKING_IN_PATTERNS = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[bB1-9]")


def restated(text: str) -> str:
    """A schema's text, in the library's words where they say the same. ValueError or
    RecursionError for what is none."""
    if not any(word in text for word in _RESTATED):
        return text
    root = json.loads(text)
    return json.dumps(changed(root, lambda schema: _restated(schema, root)))


def loosened(root: Schema) -> Schema:
    """Without what the library lacks: whatever fits the schema fits this."""
    loose: Schema = changed(root, lambda schema: _loosened(_restated(schema, root)))
    return loose


def _restated(schema: Schema, root: Schema) -> Schema:
    schema = without_other_format(schema)
    if schema.get("uniqueItems") is False:
        schema = without(schema, "uniqueItems")
    return _with_names(schema, root) if "propertyNames" in schema else schema


def _with_names(schema: Schema, root: Schema) -> Schema:
    """A map, as Pydantic and Zod write it: keys are any texts, some, or fit a pattern."""
    names = _looked_up(schema["propertyNames"], root)
    if names in (True, {}):
        return without(schema, "propertyNames")
    if "properties" in schema or "patternProperties" in schema:
        return schema
    values = schema.get("additionalProperties", True)
    match names, schema.get("required", []):
        case {"pattern": str(pattern), **more}, [] if not more:
            keys: Schema = {"patternProperties": {pattern: values}}
        case {"enum": [*texts], **more}, [*required] if not more and _are_of(required, texts):
            # Of a pattern whose keys are all required the library would still look for others.
            others = [re.escape(text) for text in texts if text not in required]
            pattern = f"^(?:{'|'.join(others)})$"
            keys = {"properties": dict.fromkeys(required, values)}
            keys |= {"patternProperties": {pattern: values}} if others else {}
        case _:
            return schema
    return {**without(schema, "propertyNames"), **keys, "additionalProperties": False}


def _are_of(required: Sequence[Any], texts: Sequence[Any]) -> bool:
    are_texts = all(isinstance(text, str) for text in texts)
    return are_texts and all(one in texts for one in required)


def _looked_up(schema: Any, root: Schema) -> Any:
    """Itself or what it refers to, without what says nothing of a text."""
    path = schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(path, str) and path.startswith("#/"):
        schema = root
        for step in path.removeprefix("#/").split("/"):
            schema = schema.get(step) if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        return schema
    is_text = schema.get("type") == "string"
    return without(schema, *_ANNOTATIONS, *(("type",) if is_text else ()))


def _loosened(schema: Schema) -> Schema:
    schema = without(schema, *_LACKING)
    if isinstance(kind := schema.get("format"), str) and kind in LACKING:
        schema = without(schema, "format")
    if isinstance(pattern := schema.get("pattern"), str) and _LACKING_IN_PATTERNS.search(pattern):
        schema = without(schema, "pattern")
    if "oneOf" in schema and "anyOf" not in schema:
        # That the branches exclude each other is seen of some alone.
        schema = {**without(schema, "oneOf"), "anyOf": schema["oneOf"]}
    return schema
