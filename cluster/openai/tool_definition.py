"""What a client says of its tools. They go to the chat template as the client wrote them."""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WrapValidator
from pydantic_core import PydanticCustomError

from cluster.openai.body import CacheMark, Part

_NOT_IN_NAMES = "< > \" ' ( ) { } [ ] , \\"
_NAME = re.compile(rf"[^\s\x00-\x1f\x7f{re.escape(_NOT_IN_NAMES)}]{{1,128}}")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError(
            "name",
            "1 to 128 characters, no white space and none of {others}",
            {"others": _NOT_IN_NAMES},
        )
    return name


ToolName = Annotated[str, AfterValidator(_check_name)]


class Function(Part):
    """`return` is of Hugging Face's making, and some templates print it; `type` is said twice by
    some clients."""

    type: Literal["function"] | None = None
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    return_: Any = Field(None, alias="return")
    cache_control: CacheMark = None


class ToolDefinition(Part):
    type: Literal["function"]
    function: Function
    cache_control: CacheMark = None


def _check_names(tools: Sequence[ToolDefinition]) -> Sequence[ToolDefinition]:
    names: set[str] = set()
    for tool in tools:
        if tool.function.name in names:
            raise PydanticCustomError(
                "names", "of different names, not twice {name}", {"name": repr(tool.function.name)}
            )
        names.add(tool.function.name)
    return tools


def _as_written(value: Any, check: Callable[[Any], Any]) -> Any:
    """None for no tools, as frameworks send them that were given none."""
    return [_for_templates(tool) for tool in value] if check(value) else None


def _for_templates(tool: dict[str, Any]) -> dict[str, Any]:
    """Which print all of it."""
    return {
        name: _without_mark(value) if name == "function" else value
        for name, value in _without_mark(tool).items()
    }


def _without_mark(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "cache_control"}


Tools = Annotated[
    list[ToolDefinition],
    Field(fail_fast=True),
    AfterValidator(_check_names),
    WrapValidator(_as_written),
]
