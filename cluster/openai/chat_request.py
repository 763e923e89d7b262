"""What /v1/chat/completions takes."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from cluster.openai.body import CacheMark, No, Part
from cluster.openai.crowd import check_crowd
from cluster.openai.sampling_fields import SamplingFields
from cluster.openai.structured import NamedGrammar, named
from cluster.openai.tool_choice import ToolChoice, compact
from cluster.openai.tool_definition import Tools
from engine.errors import RequestError
from engine.grammar.value import Grammar, GrammarKind
from engine.sampling import MAX_LOGPROBS
from engine.text.chat_template import ChatOptions

MAX_MESSAGES = 4096


class TextPart(Part):
    """Of a message's content."""

    type: Literal["text"]
    text: str
    cache_control: CacheMark = None
    prompt_cache_breakpoint: CacheMark = None


_Content = str | list[TextPart] | None  # what `_check_content` takes


def _check_content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "a string or an array of text parts")
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_audio", "file", "video_url", "audio_url"):
            raise PydanticCustomError("content", f"text: {kind} is not supported")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError(
                "content", 'a string or an array of {"type": "text", "text": ...}'
            )
        unknown = [name for name in part if name not in TextPart.model_fields]
        if unknown:
            raise PydanticCustomError(
                "content",
                "text parts of type and text alone; number {i} has {name}",
                {"name": repr(unknown[0][:64]), "i": i},
            )
    return [{"type": "text", "text": part["text"]} for part in value]


class FunctionCall(Part):
    name: str
    arguments: str
    parsed_arguments: Any = None  # the official client's reading of them, sent back


class ToolCall(Part):
    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


_NOT_OF_TEMPLATES: dict[str, Any] = {
    **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "parsed"), True),
    "cache_control": True,
    "tool_calls": {"__all__": {"function": {"parsed_arguments"}}},
}


class ChatMessage(Part):
    """One turn. Before the last, five are what clients send back of an answer they got: three as
    null, and `parsed`, the official client's reading of the content."""

    role: str
    content: Annotated[Any, BeforeValidator(_check_content, _Content)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    cache_control: CacheMark = None

    def as_dict(self) -> dict[str, Any]:
        message = self.model_dump(exclude_none=True, exclude=_NOT_OF_TEMPLATES)
        if self.refusal is not None:
            message.setdefault("content", self.refusal)
        if not self.tool_calls:  # templates ask whether there is a list, and not what it holds
            message.pop("tool_calls", None)
        return message


def _check_arguments(messages: list[ChatMessage]) -> list[ChatMessage]:
    """JSON, which is read for the template, and all of it is there at once."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    if calls:
        texts = [call.function.arguments.encode(errors="replace") for call in calls]
        check_crowd(*texts, param="messages")
    return messages


Messages = Annotated[
    list[ChatMessage],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    AfterValidator(_check_arguments),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_Document = Annotated[dict[str, str], Field(fail_fast=True)]


class ChatRequest(SamplingFields):
    not_supported: ClassVar = {
        **SamplingFields.not_supported,
        "audio": (),
        "chat_template": (),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "mm_processor_kwargs": ({},),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Annotated[Messages, Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    max_completion_tokens: int | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: No = False
    documents: Annotated[list[_Document], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: No = False

    def chat_options(self) -> ChatOptions:
        prompt = self.add_generation_prompt
        return ChatOptions(
            tools=self.wanted_calls.tools,
            documents=self.documents,
            add_generation_prompt=not self.continue_final_message if prompt is None else prompt,
            continue_final_message=self.continue_final_message,
            reasoning_effort=self.reasoning_effort,
            template_kwargs=self.chat_template_kwargs,
        )

    def chat_messages(self) -> Sequence[dict[str, Any]]:
        return [message.as_dict() for message in self.messages]

    def wanted_max_tokens(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError("max_completion_tokens", f"{new}, but max_tokens says {old}")
        return old if new is None else new

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", "needs logprobs=true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def wanted_calls(self) -> ToolChoice:
        tools: Any = self.tools  # as they were written
        return ToolChoice.read(tools, self.tool_choice)

    @property
    def one_call(self) -> bool:
        return self.parallel_tool_calls is False

    @cached_property
    def named_grammar(self) -> NamedGrammar | None:
        """Also the one that makes calls of the whole answer."""
        named = super().named_grammar
        if not self.wanted_calls.must_call:
            return named
        if named is not None:
            raise RequestError("tool_choice", f"its calls leave no place for {named.field}")
        return self.grammar_of_calls(in_array=True)

    def grammar_of_calls(self, *, in_array: bool) -> NamedGrammar:
        choice = self.wanted_calls
        schemas = choice.schemas
        whole = choice.schema(schemas, in_array=in_array, one_call=self.one_call)
        parts = [_of_schema(field, schema) for field, schema in schemas.items()]
        return _of_schema("tools", whole)._replace(parts=tuple(parts))


def _of_schema(field: str, schema: Mapping[str, Any]) -> NamedGrammar:
    return NamedGrammar(
        field, named(field, lambda: Grammar(GrammarKind.JSON_SCHEMA, compact(schema)))
    )
