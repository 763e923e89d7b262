"""Keywords of JSON schemas that the library lacks: some can be said in others that it has, the rest
only be left out, where an answer may break them."""

import json
import re
from typing import Any

from engine.grammar.formats import LACKING, without_other_format
from engine.grammar.schemas import Schema, changed, without

_RESTATED = ('"$id"', '"format"', '"propertyNames"', '"uniqueItems"')  # as a text has them
_ANNOTATIONS = ("$comment", "description", "title")
# More fits where one of these is not said, and they say nothing of what others mean.
_LACKING = (
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    *("not", "if", "then", "else"),
)
_IN_NO_URI = re.compile(r"[^\w.~:/?#\[\]@!$&'()*+,;=%-]", re.ASCII)
# Look-around, word boundaries and back references.
_LACKING_IN_PATTERNS = re.compile(r"\(\?<?[=!]|\(\?P=|(?<!\\)(?:\\\\)*\\[bBk1-9]")
# In a reference. Behind a property of that name stands a word.
_ONE_OF = re.compile(r"/oneOf/(?=\d)")


def restated(text: str) -> str:
    """A schema's text, in the library's words where they say the same. ValueError or
    RecursionError for what is none."""
    if not any(word in text for word in _RESTATED):
        return text
    root = json.loads(text)
    return json.dumps(changed(root, lambda schema: _restated(schema, root)))


def loosened(root: Schema) -> Schema:
    """Without what the library lacks: whatever fits the schema fits this. Takes time in the square
    of what it is given."""
    loose: Schema = changed(root, _loosened)
    loose = changed(loose, lambda schema: _without_lacking_names(schema, loose))
    return loose


def _restated(schema: Schema, root: Schema) -> Schema:
    schema = without_other_format(schema)
    if isinstance(name := schema.get("$id"), str) and _IN_NO_URI.search(name):
        schema = without(schema, "$id")  # to which nothing can refer
    if schema.get("uniqueItems") is False:
        schema = without(schema, "uniqueItems")
    return _with_names(schema, root) if "propertyNames" in schema else schema


def _with_names(schema: Schema, root: Schema) -> Schema:
    names = _looked_up(schema["propertyNames"], root)
    if not _are_kept(names, schema):
        return schema
    schema = without(schema, "propertyNames")
    if names in (True, {}):
        return schema
    values = schema.get("additionalProperties", True)
    if "pattern" in names:
        keys: Schema = {"patternProperties": {names["pattern"]: values}}
    else:
        # Of a pattern whose keys are all required the library would still look for others.
        required = dict.fromkeys(schema.get("required", ()), values)
        others = [re.escape(text) for text in names["enum"] if text not in required]
        pattern = f"^(?:{'|'.join(others)})$"
        keys = {"properties": required}
        keys |= {"patternProperties": {pattern: values}} if others else {}
    return {**schema, **keys, "additionalProperties": False}


def _are_kept(names: Any, schema: Schema) -> bool:
    """Of a map, as Pydantic and Zod write it: keys are any texts, some, or fit a pattern."""
    if names in (True, {}):
        return True
    if "properties" in schema or "patternProperties" in schema:
        return False
    match names, schema.get("required", []):
        case {"pattern": str(), **more}, []:
            return not more
        case {"enum": [*texts], **more}, [*required]:
            are_texts = all(isinstance(one, str) for one in (*texts, *required))
            return not more and are_texts and set(required) <= set(texts)
    return False


def _looked_up(schema: Any, root: Schema) -> Any:
    """Itself or what it refers to, without what says nothing of a text."""
    match names := _of_a_text(schema):
        case {"$ref": str(path), **more} if not more and path.startswith("#/"):
            found: Any = root
            for step in path.removeprefix("#/").split("/"):
                found = found.get(step) if isinstance(found, dict) else None
            return _of_a_text(found)
    return names


def _of_a_text(schema: Any) -> Any:
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
    if isinstance(by_pattern := schema.get("patternProperties"), dict):
        kept = {key: one for key, one in by_pattern.items() if not _LACKING_IN_PATTERNS.search(key)}
        if kept != by_pattern:  # what the others say of a key may be that there is none
            schema = {**without(schema, "additionalProperties"), "patternProperties": kept}
    if isinstance(path := schema.get("$ref"), str):
        schema = {**schema, "$ref": _ONE_OF.sub("/anyOf/", path)}
    if "oneOf" in schema:  # that its branches exclude each other is seen of some alone
        any_of, all_of = {"anyOf": schema["oneOf"]}, schema.get("allOf", [])
        schema = without(schema, "oneOf")
        if "anyOf" not in schema:
            schema |= any_of
        elif isinstance(all_of, list):
            schema |= {"allOf": [*all_of, any_of]}
    return schema


def _without_lacking_names(schema: Schema, root: Schema) -> Schema:
    """Those that can be said otherwise stay, as they may be many times as long then."""
    if "propertyNames" not in schema:
        return schema
    is_kept = _are_kept(_looked_up(schema["propertyNames"], root), schema)
    return schema if is_kept else without(schema, "propertyNames")
