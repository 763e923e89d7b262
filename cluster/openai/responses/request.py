"""What /v1/responses takes, and the chat that it asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from cluster.openai.body import Part, from_fields
from cluster.openai.chat_request import ChatRequest, Effort
from cluster.openai.errors import ApiError, bad_request
from cluster.openai.plan import Plan, plan_chat
from cluster.openai.request_limits import RequestLimits
from cluster.openai.responses.items import messages_of
from cluster.openai.responses.tools import Tools, chat_tool_choice
from cluster.openai.sampling_fields import SharedFields
from cluster.openai.structured import NamedGrammar
from cluster.openai.wording import Json
from cluster.served_model import ServedModel
from engine.errors import RequestError
from engine.sampling import MAX_LOGPROBS

LOGPROBS, SEALED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"


_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, fail_fast=True),
]


def _check_input(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("input", "a string or an array of items")
    return value


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Part):
    """Reasoning comes as it is, and no summary of it."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamOptions(Part):
    include_obfuscation: bool | None = None


class ResponsesRequest(SharedFields):
    not_supported: ClassVar = {
        "access_programs": ({},),
        "background": (False,),
        "background_options": ({},),
        "context_management": ([],),
        "conversation": (),
        "image": ({},),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    }

    input: Annotated[Any, BeforeValidator(_check_input, str | list[dict[str, Any]])]
    instructions: str | None = None
    include: Annotated[list[Literal[LOGPROBS, SEALED_REASONING]] | None, Field(fail_fast=True)] = (  # type: ignore[valid-type]
        None
    )
    max_output_tokens: int | None = None
    metadata: _Metadata | None = None  # the answer repeats it, as clients know it
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: Any = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None  # for records, as `metadata`

    @cached_property
    def known_tools(self) -> Tools:
        return Tools.read(self.tools)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def seals_reasoning(self) -> bool:
        return SEALED_REASONING in (self.include or ())

    def as_chat(self) -> ChatRequest:
        """ApiError and RequestError by the names that the chat has."""
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise bad_request(name, f"{name} is not supported", "unsupported_parameter")
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError("top_logprobs", f"needs {LOGPROBS!r} in include")
        said = self.model_fields_set
        fields = {name: getattr(self, name) for name in (*_OF_CHAT, "model") if name in said}
        fields["messages"] = messages_of(self.instructions, self.input)
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        fields["tools"] = [*self.known_tools.functions] or None
        fields["tool_choice"] = chat_tool_choice(self.tool_choice)
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _response_format(self.text.format)
        return from_fields(ChatRequest, fields)


_OF_CHAT = (*SharedFields.model_fields, "parallel_tool_calls", "chat_template_kwargs")


def plan_response(request: ResponsesRequest, model: ServedModel, limits: RequestLimits) -> Plan:
    """Errors name the fields that the client wrote."""
    paths = request.known_tools.paths
    try:
        plan = plan_chat(request.as_chat(), model, limits)
    except RequestError as error:
        raise error.renamed(_name(error.field, paths)) from None
    except ApiError as error:
        if error.param is None:
            raise
        name = _name(error.param, paths)
        raise replace(error, param=name, message=error.message.replace(error.param, name)) from None
    named = plan.named_grammar
    return plan if named is None else replace(plan, named_grammar=_renamed(named, paths))


_NAMES: Mapping[str, str] = {
    r"messages\b.*": "input",
    r"logprobs$": "top_logprobs",
    r"max_(completion_)?tokens$": "max_output_tokens",
    r"response_format\.json_schema\b": "text.format",
    r"response_format\b": "text.format",
    r"reasoning_effort$": "reasoning.effort",
}
_TOOL = re.compile(r"tools\[(\d+)\](\.function\b)?(?P<rest>.*)")


def _name(field: str, tools: Sequence[str]) -> str:
    """`tools`: where each of them is."""
    for pattern, name in _NAMES.items():
        if re.match(pattern, field):
            return re.sub(pattern, name, field, count=1)
    tool = _TOOL.fullmatch(field)
    return field if tool is None else tools[int(tool[1])] + tool["rest"]


def _renamed(named: NamedGrammar, tools: Sequence[str]) -> NamedGrammar:
    parts = tuple(_renamed(part, tools) for part in named.parts)
    return named._replace(field=_name(named.field, tools), parts=parts)


def _response_format(wanted: TextFormat) -> Json:
    if wanted.type != "json_schema":
        if wanted.schema_ is not None:
            raise RequestError("text.format.schema", "needs the type 'json_schema'")
        return {"type": wanted.type}
    if wanted.schema_ is None:
        raise RequestError("text.format.schema", "is required with the type 'json_schema'")
    schema = {"schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}
