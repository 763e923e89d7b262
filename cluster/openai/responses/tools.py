"""Functions as /v1/responses has them, and as a chat's template is told of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from cluster.openai.body import CacheMark, Part, part_of
from cluster.openai.errors import bad_request
from cluster.openai.tool_definition import ToolName
from cluster.openai.wording import Json
from engine.errors import RequestError


class FunctionTool(Part):
    """The last four ask for nothing, as OpenAI's answers repeat a tool."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheMark = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None
    async_: Literal[False] | None = Field(None, alias="async")


_OF_CHAT = {"name", "description", "parameters", "strict"}


class NamespaceTool(Part):
    """Its name stands before that of each of its functions, of which there may be many."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[Any]


class Tools(NamedTuple):
    """What a model may call; those of a namespace by `NAMESPACE.NAME`, which is told of itself by
    the first of them."""

    functions: Sequence[Json] = ()  # as a chat has them
    paths: Sequence[str] = ()  # where the client wrote each of them
    names: Mapping[str, Json] = {}  # how an answer's item names what is in a namespace

    @classmethod
    def read(cls, given: Sequence[Any] | None) -> Tools:
        """ApiError for what is no function."""
        functions, paths, names = [], [], {}
        for path, tool, space in _flat(given or ()):
            function = tool.model_dump(include=_OF_CHAT, exclude_none=True)
            if space is not None:
                function["name"] = in_namespace(space.name, tool.name)
                names[function["name"]] = {"name": tool.name, "namespace": space.name}
                if space.description and path.endswith("[0]"):
                    said = (space.description, tool.description or "")
                    function["description"] = "\n\n".join(said).rstrip()
            functions.append({"type": "function", "function": function})
            paths.append(path)
        return cls(functions, paths, names)

    def name_of(self, called: str) -> Json:
        return self.names.get(called, {"name": called})


def in_namespace(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _flat(given: Sequence[Any]) -> Iterator[tuple[str, FunctionTool, NamespaceTool | None]]:
    for index, tool in enumerate(given):
        path = f"tools[{index}]"
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            space = part_of(NamespaceTool, tool, path)
            for inner, function in enumerate(space.tools):
                place = f"{path}.tools[{inner}]"
                yield place, _function(function, place), space
        else:
            yield path, _function(tool, path), None


def _function(tool: Any, path: str) -> FunctionTool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        message = f"{path}: tools of type {kind[:64]!r} are not supported"
        raise bad_request(path, message, "unsupported_parameter")
    return part_of(FunctionTool, tool, path)


def chat_tool_choice(choice: Any) -> Any:
    match choice:
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name), **rest} if not rest:
            return {"type": "function", "function": {"name": name}}
    raise RequestError(
        "tool_choice",
        "must be 'none', 'auto', 'required' or {\"type\": \"function\", \"name\": ...}",
    )
