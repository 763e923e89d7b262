"""Bare text and a schema make a value."""

import json
from typing import Any

import pytest

from cluster.openai.reading.bare_values import BareValues

NODE = {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}, {"type": "object"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, " 12\n", " 12\n"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"type": "integer"}, " -12\n", -12),
        ({"type": "integer"}, "2.0", 2.0),
        ({"type": "integer"}, "2.5", "2.5"),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "nothing", "nothing"),
        ({"type": "object"}, '{"a": {"b": [1, null]}}', {"a": {"b": [1, None]}}),
        ({"type": "object"}, '{"a": "x\ny"}', {"a": "x\ny"}),
        ({"type": "object"}, "{'a': True, 1: (2,)}", {"a": True, "1": [2]}),
        ({"type": "object"}, "{'a': b'x'}", "{'a': b'x'}"),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "array"}, "[open('x')]", "[open('x')]"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "2"]}, "1", 1),
        ({"const": None}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/Text"}]}, "1", "1"),
        ({"$ref": "#/$defs/Node"}, "null", None),
        ({"$ref": "#/$defs/Node"}, "1", "1"),
        ({"$ref": "#/$defs/Alias"}, "1", "1"),
        ({"$ref": "#/$defs/Circle"}, "1", 1),
        ({"$ref": "elsewhere"}, "1", 1),
        ({"$ref": "#/$defs/Text/type/0"}, "1", 1),
        ({"type": "int"}, "1", 1),
        ({"anyOf": []}, "1", 1),
        ({"description": "a thing"}, "a thing", "a thing"),
        (True, "[1]", [1]),
        (None, "1", 1),
    ],
)
def test_a_value_has_a_type_of_its_schema_or_is_text(schema: Any, text: str, value: Any) -> None:
    circle = {"$ref": "#/$defs/Circle"}
    shared = {"Node": NODE, "Text": {"type": "string"}, "Circle": circle}
    shared["Alias"] = {"$ref": "#/$defs/Text"}
    values = BareValues({"properties": {"x": schema}, "$defs": shared})
    read = json.loads(values.as_json("x", text))
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("schema", [None, [], "x", {}, {"properties": 1}, {"properties": {}}])
def test_no_schema_allows_all(schema: Any) -> None:
    values = BareValues(schema)
    assert [values.as_json("x", text) for text in ("1", "one", "{}")] == ["1", '"one"', "{}"]
    assert not values.is_string("x")


def test_strings_are_known_before_they_come() -> None:
    values = BareValues(
        {"properties": {"s": {"type": "string"}, "n": {"type": ["string", "null"]}}}
    )
    assert values.is_string("s")
    assert not values.is_string("n")
    assert not values.is_string("other")
