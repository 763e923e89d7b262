"""What a client wants of its tools: `tool_choice`, and the grammar that makes a model obey."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from cluster.openai.structured import named
from engine.errors import RequestError
from engine.grammar.keywords import loosened
from engine.grammar.schemas import BY_NAME, NO_SCHEMAS
from engine.grammar.value import Grammar, GrammarKind

Tool = Mapping[str, Any]
_ANY_OBJECT = {"type": "object"}
_OF_ANY_OBJECT: Tool = {"function": {"parameters": _ANY_OBJECT}}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolChoice(NamedTuple):
    """`must_call`: the answer is calls and nothing else; of the function `name` alone if set."""

    tools: Sequence[Tool] | None  # that the model is told of
    must_call: bool = False
    name: str | None = None

    @classmethod
    def read(cls, tools: Sequence[Tool] | None, choice: Any) -> ToolChoice:
        """RequestError for a choice that is none."""
        name: str | None = None
        match choice:
            case None | "auto":
                return cls(tools)
            case "none":
                return cls(None)
            case "required":
                pass
            case {"type": "function", "function": {"name": str(said), **rest}} if (
                len(choice) == 2 and not rest
            ):
                name = said
            case _:
                raise RequestError(
                    "tool_choice",
                    "must be 'none', 'auto', 'required' or "
                    '{"type": "function", "function": {"name": ...}}',
                )
        if tools is None:
            raise RequestError("tool_choice", "needs tools")
        chosen = cls(tools, must_call=True, name=name)
        if name is not None and name not in chosen.names:
            raise RequestError("tool_choice", f"{name!r} is none of the tools")
        return chosen

    @property
    def names(self) -> Sequence[str]:
        return [_name(tool) for tool in self.tools or ()]

    @property
    def parameters(self) -> Mapping[str, Any] | None:
        """By name, as the client wrote them: no schemas, maybe, where no grammar needs them."""
        if self.tools is None:
            return None
        return {_name(tool): tool["function"].get("parameters") for tool in self.tools}

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schemas of the arguments of whatever may be called, by where the client wrote
        them. Where nothing must be called, those of strict functions are kept alone."""
        assert self.tools is not None
        chosen = {
            f"tools[{index}].function.parameters": tool if keeps else _OF_ANY_OBJECT
            for index, tool in enumerate(self.tools)
            for keeps in [self.must_call or _is_strict(tool)]
            if self.name in (None, _name(tool))
        }
        _check_sizes(chosen)
        schemas = {field: _parameters(tool) for field, tool in chosen.items()}
        if self.name is None:
            for schema in schemas.values():
                schema.pop("$id", None)  # references start at the array of calls
        return schemas

    @property
    def may_call_strictly(self) -> bool:
        return not self.must_call and any(map(_is_strict, self.tools or ()))

    def schema(
        self, schemas: Mapping[str, dict[str, Any]], *, in_array: bool, one_call: bool
    ) -> dict[str, Any]:
        """JSON schema, made of `schemas`: of the arguments of the one that is named, or else of an
        array of calls, or of one call."""
        if self.name is not None:
            return next(iter(schemas.values()))
        calls, arguments = [], {}
        for index, (name, parameters) in enumerate(zip(self.names, schemas.values(), strict=True)):
            root = f"#/$defs/{index}"
            arguments[str(index)] = _moved(parameters, root)
            calls.append(_call_schema(name, root))
        whole: dict[str, Any] = {"anyOf": calls}
        if in_array:
            whole = {"type": "array", "minItems": 1, "items": whole}
            whole |= {"maxItems": 1} if one_call else {}
        return whole | {"$defs": arguments}


def _call_schema(name: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": arguments}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """With what refers to the schema's root referring to `root`, where it is in a larger one."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # which is a root of its own
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        match key:
            case "$ref" if isinstance(value, str) and _starts_at_root(value):
                moved[key] = root + value[1:]
            case _ if key in NO_SCHEMAS:
                moved[key] = value
            case _ if key in BY_NAME and isinstance(value, dict):
                moved[key] = {name: _moved(one, root) for name, one in value.items()}
            case _:
                moved[key] = _moved(value, root)
    return moved


def _starts_at_root(reference: str) -> bool:
    return reference in ("", "#") or reference.startswith("#/")


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _is_strict(tool: Tool) -> bool:
    return bool(tool["function"].get("strict"))


def _check_sizes(tools: Mapping[str, Tool]) -> None:
    """RequestError for what is too large for a grammar: it would take long to be loosened."""
    schemas = {field: tool["function"].get("parameters") for field, tool in tools.items()}
    if len(schemas) > 1:
        schemas["tools"] = [*schemas.values()]
    for field, schema in schemas.items():
        named(field, partial(Grammar, GrammarKind.JSON_SCHEMA, compact(schema)))


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool["function"].get("parameters")
    if parameters is None:  # an empty list of them, as OpenAI has it
        return {**_NO_PARAMETERS}
    if not _is_strict(tool):
        parameters = loosened(parameters)
    said = parameters.get("type", "object")
    if said != "object" and not (isinstance(said, list) and "object" in said):
        raise RequestError("tools", f"parameters of {_name(tool)!r} must be of type object")
    return {**parameters, **_ANY_OBJECT}


def compact(schema: Any) -> str:
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
