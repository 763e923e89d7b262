"""Request bodies: JSON to typed values, where every unknown or unsupported field is an error.

The first error is told, and no type looks for many: a body has room for millions, and while
pydantic collects them nothing else runs.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from cluster.openai.crowd import check_crowd
from cluster.openai.errors import ApiError, bad_request
from cluster.validation import rule

# Types are strict: "16" is no number and true is none; an integer is a number.
_STRICT = {"strict": True, "frozen": True, "allow_inf_nan": False}


def unless_null(default: Any) -> BeforeValidator:
    """Of a field that has a default: null is "not said"."""
    return BeforeValidator(lambda value: default if value is None else value, type(default) | None)


_DEEPEST = 200  # by the library that reads it
_NUMBER = re.compile(r"-?\d+")
_OF_JSON = {
    "string_type": "be a string",
    "list_type": "be an array",
    **dict.fromkeys(("dict_type", "model_type"), "be an object"),
    "none_required": "be null",
    "too_short": "have at least {min_length} element",
    "too_long": "have at most {max_length} elements",
    "string_too_long": "have at most {max_length} characters",
}

No = Annotated[bool, unless_null(False)]
Yes = Annotated[bool, unless_null(True)]

Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# Up to where a prompt is to be cached, by OpenAI or Anthropic: here all of every prompt is.
CacheMark = dict[str, Any] | None


class Part(BaseModel):
    """An object inside a body."""

    model_config = ConfigDict(extra="forbid", **_STRICT)  # type: ignore[typeddict-item]

    @model_validator(mode="before")
    @classmethod
    def _leave_one_unknown(cls, value: Any) -> Any:
        """Each unknown name is an error of its own."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in value if name not in known)
        return {name: value[name] for name in (*(known & value.keys()), unknown)}


class Body(BaseModel):
    """A whole body. `not_supported` names parameters that exist elsewhere, with the values
    that ask for nothing (their defaults, which many clients send); null asks for nothing too."""

    model_config = ConfigDict(extra="allow", **_STRICT)  # type: ignore[typeddict-item]
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None

    def check_extra_fields(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name not in self.not_supported:
                raise bad_request(name, f"unknown parameter {name!r}", "unknown_parameter")
            if value is not None and not self.asks_for_nothing(name, value):
                raise bad_request(name, f"{name} is not supported", "unsupported_parameter")

    def asks_for_nothing(self, name: str, value: Any) -> bool:
        is_bool = isinstance(value, bool)  # and no number, as it is to Python
        return any(
            value == one and isinstance(one, bool) is is_bool for one in self.not_supported[name]
        )


AnyBody = TypeVar("AnyBody", bound=Body)
AnyPart = TypeVar("AnyPart", bound=Part)


def parse(kind: type[AnyBody], data: bytes) -> AnyBody:
    text = data.removeprefix(BOM_UTF8)  # of a file that was written on Windows
    check_crowd(text)
    return _checked(lambda: kind.model_validate_json(text))


def from_fields(kind: type[AnyBody], fields: Mapping[str, Any]) -> AnyBody:
    """By the same rules, for a caller in this process."""
    return _checked(lambda: kind.model_validate(fields))


def part_of(kind: type[AnyPart], value: Any, path: str) -> AnyPart:
    """An object that is read by what one of its fields says; `path` is where it stands."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False), path) from error


def _checked(read: Callable[[], AnyBody]) -> AnyBody:
    try:
        body = read()
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)) from error
    body.check_extra_fields()
    return body


def _explain(errors: Sequence[ErrorDetails], root: str = "") -> ApiError:
    """The first of them; one is enough to send a client back."""
    first = errors[0]
    path = _path(first["loc"], root)
    match first["type"]:
        case "json_invalid" if "recursion limit" in first["ctx"]["error"]:
            return bad_request(None, f"the body is nested more than {_DEEPEST} deep")
        case "json_invalid":
            return bad_request(None, f"the body is not valid JSON: {first['ctx']['error']}")
        case "model_type" if not path:
            return bad_request(None, "the body must be a JSON object")
        case "extra_forbidden":
            return bad_request(path, f"unknown parameter {path!r}", "unknown_parameter")
        case _ if first["type"] == "missing" or _is_null(first):
            return bad_request(path, f"{path} is required", "missing_required_parameter")
        case _:
            return bad_request(path, f"{path}: must {_rule(first)}", "invalid_value")


def _is_null(error: ErrorDetails) -> bool:
    """Of a field that has no default: it is as good as missing."""
    return len(error["loc"]) == 1 and error["input"] is None


def _rule(error: ErrorDetails) -> str:
    if error["type"] == "too_long" and error["ctx"]["max_length"] == 0:
        return "be empty"
    words = rule(error, _OF_JSON)
    if words is None:  # one of our own types has said it
        return "be " + error["msg"].removeprefix("Input should be ")
    return f"{words}, not {_given(error['input'])}" if words.startswith("be ") else words


def _given(value: Any) -> str:
    """What it is: a text may be as long as a body, and a secret."""
    match value:
        case None | bool():
            return json.dumps(value)
        case int() | float():
            return str(value)
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _path(location: Sequence[int | str], root: str = "") -> str:
    """messages[0].content"""
    parts = [f"[{step}]" if _NUMBER.fullmatch(str(step)) else f".{step}" for step in location]
    steps = "".join(part for part in parts if part != ".[key]")
    return f"{root}{steps}".removeprefix(".")
