"""What is wrong with options, in our words: the key, in its place, and what would be right. The
words of requests are shared as far as YAML and JSON have the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import ErrorDetails

from engine.errors import ConfigError
from protos.errors import PlaneError

Options = TypeVar("Options", bound=BaseModel)

# What is right, where pydantic would tell of its own types: of every format, and of YAML.
_OF_ANY = {
    **dict.fromkeys(("bool_type", "bool_parsing"), "be true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "be a number"),
    "finite_number": "be a finite number",
    "greater_than": "be above {gt:.15g}",
    "greater_than_equal": "be at least {ge:.15g}",
    "less_than": "be below {lt:.15g}",
    "less_than_equal": "be at most {le:.15g}",
}
_MAPPING = "be a mapping from names to values"
_TEXT = "be a text, in quotes where it looks like something else"
_OF_YAML = {
    "missing": "be given",
    **dict.fromkeys(("string_type", "invalid_key"), _TEXT),
    **dict.fromkeys(("list_type", "tuple_type"), "be a list"),
    **dict.fromkeys(("dict_type", "model_type"), _MAPPING),
}


def checked(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """ConfigError names the key."""
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _config_error(_path(options, first), first) from error


def rule(error: ErrorDetails, own: Mapping[str, str]) -> str | None:
    """What the value must do; `own` are the words of the format that it stands in. None for what
    only the error's own message says."""
    words = own.get(error["type"]) or _OF_ANY.get(error["type"])
    return words and words.format(**error.get("ctx", {}))


@contextmanager
def in_place(place: str, names: Collection[str]) -> Iterator[None]:
    """ConfigError names what stands there as `checked` does. What is none of the names, as a
    variable of the environment, keeps its own."""
    try:
        yield
    except (ConfigError, PlaneError) as error:
        name = f"{place}.{error.field}" if error.field in names else error.field
        raise ConfigError(name, error.message) from error


def one_of(value: str, choices: Collection[str]) -> str:
    """For validators."""
    if value not in choices:
        raise ValueError(f"{value!r}, must be one of {', '.join(choices)}")
    return value


def _absolute(path: str) -> str:
    if not Path(path).is_absolute():
        raise ValueError(f"{path!r}, must be an absolute path")
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


def check_known(said: object, read: object, place: str = "") -> None:
    """For others' types, which drop what they do not know: ConfigError names what of `said` is not
    in what was read of it."""
    if isinstance(said, dict) and isinstance(read, dict):
        for key, value in said.items():
            if key not in read:
                raise ConfigError(f"{place}{key}", "unknown option")
            check_known(value, read[key], f"{place}{key}.")
    elif isinstance(said, list) and isinstance(read, list):
        for number, pair in enumerate(zip(said, read, strict=True)):
            check_known(*pair, f"{place}{number}.")


def _path(options: Any, error: ErrorDetails) -> str:
    """As it was said: pydantic also names which of several types it has tried."""
    path: list[str] = []
    for part in error["loc"]:
        try:
            options = options[part]
        except (TypeError, LookupError):
            if error["type"] != "missing":
                continue
        path.append(str(part))
    return ".".join(path)


def _config_error(path: str, error: ErrorDetails) -> ConfigError:
    said = error["msg"].removeprefix("Value error, ").removeprefix("Input should ")
    message = rule(error, _OF_YAML) or said
    if not path:  # said by a check of the whole, which names the key itself
        path, _, message = message.partition(": ")
    match error["type"]:
        case "extra_forbidden":
            return ConfigError(path, "unknown option")
        case "value_error":
            return ConfigError(path, message)
        case _:
            return ConfigError(path, f"must {message}")
