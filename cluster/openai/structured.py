"""What an answer must fit, by the names of OpenAI and of vLLM, old and new."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from cluster.openai.body import Part, Texts
from engine.errors import RequestError
from engine.grammar.keywords import loosened
from engine.grammar.value import ANY_JSON_OBJECT, MAX_GRAMMAR_BYTES, Grammar, GrammarKind

_MAX_SCHEMA_CHARS = 16 * MAX_GRAMMAR_BYTES  # with the white space of a text that is not compact


class JsonSchemaFormat(Part):
    """`strict`: an answer fits all of the schema, or else what can be kept of it."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


def _check_schema(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise PydanticCustomError("schema", "a JSON schema: an object, or the text of one")
    return value


AnySchema = Annotated[Any, BeforeValidator(_check_schema, str | dict[str, Any])]


class StructuredOutputs(Part):
    json_: AnySchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class NamedGrammar(NamedTuple):
    """`field` is where the client wrote it, or wrote the parts that it is made of."""

    field: str
    grammar: Grammar
    parts: tuple["NamedGrammar", ...] = ()


def read_grammar(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    guided: Mapping[str, Any],
) -> NamedGrammar | None:
    """RequestError where there are two. `guided` is vLLM's older form, by name."""
    given: dict[str, tuple[str, Any]] = {}
    if response_format is not None:
        given |= _of_response_format(response_format)
    if structured_outputs is not None:
        values = structured_outputs.model_dump(by_alias=True)
        given |= {f"structured_outputs.{name}": (name, value) for name, value in values.items()}
    given |= {f"guided_{name}": (name, value) for name, value in guided.items()}
    asked = {field: asked for field, asked in given.items() if asked[1] not in (None, False)}
    if structured_outputs is not None and not asked:
        raise RequestError("structured_outputs", f"must have one of {', '.join(_READERS)}")
    if not asked:
        return None
    (field, (name, value)), *others = asked.items()
    for other, what in others:
        if what != (name, value):  # by vLLM's older name as well is once
            raise RequestError(other, f"does not go with {field}")
    return NamedGrammar(field, named(field, lambda: _READERS[name](value)))


def named(field: str, make: Callable[[], Grammar]) -> Grammar:
    """An error of the grammar's is one of this field's."""
    try:
        return make()
    except RequestError as error:
        raise error.renamed(field) from None


def _of_response_format(value: ResponseFormat) -> dict[str, tuple[str, Any]]:
    schema = value.json_schema
    if value.type == "json_schema" and schema is None:
        raise RequestError("response_format", "json_schema is required with the type of that name")
    if value.type != "json_schema" and schema is not None:
        raise RequestError("response_format", "json_schema needs the type of that name")
    if schema is None:
        return {"response_format": ("json_object", value.type == "json_object")}
    if schema.schema_ is None:
        return {"response_format": ("json_object", True)}
    field, kept = "response_format.json_schema.schema", schema.schema_
    if not schema.strict:
        named(field, lambda: _read_json(kept))  # RequestError where it is too large to be loosened
        kept = loosened(kept)
    return {field: ("json", kept)}


def _read_json(value: str | dict[str, Any]) -> Grammar:
    if isinstance(value, str) and len(value) > _MAX_SCHEMA_CHARS:
        raise RequestError("grammar", f"must have at most {_MAX_SCHEMA_CHARS} characters")
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise RequestError("grammar", f"must be a JSON schema ({error})") from None
    if not isinstance(schema, dict):
        raise RequestError("grammar", "must be a JSON schema, which is an object")
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _read_choice(value: Sequence[str]) -> Grammar:
    if not value or not all(value):
        raise RequestError("grammar", "must be an array of at least one text, none of them empty")
    return Grammar(GrammarKind.CHOICE, json.dumps(value))


_READERS: Mapping[str, Callable[[Any], Grammar]] = {
    "json": _read_json,
    "regex": lambda value: Grammar(GrammarKind.REGEX, value),
    "choice": _read_choice,
    "grammar": lambda value: Grammar(GrammarKind.GRAMMAR, value),
    "json_object": lambda value: ANY_JSON_OBJECT,
}
