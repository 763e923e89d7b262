"""Chat messages to the prompt that a model was trained on, by the template in its folder.

Templates are written for transformers, so they get the helpers and the whitespace rules that
transformers gives them. They come with the model and run in jinja's sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError, RequestError, UnprocessableError
from engine.models.json_config import read_json_object
from engine.text.messages import (
    by_the_system,
    flatten_content,
    prepare,
    split_content,
    thinking_alone,
    with_content,
    with_description,
    with_one_beginning,
)
from engine.text.special_tokens import SpecialTokens
from engine.text.template_reads import (
    adds_arguments,
    adds_descriptions,
    asks_for_none,
    asks_for_text,
    reads_parts,
    refuses_thinking_beside_content,
)

Message = Mapping[str, Any]
DEFAULT, TOOL_USE = "default", "tool_use"
# Marks where the last message ends; no tokenizer and no template has a meaning for it. A
# template that trims messages takes the space away.
_END_MARK = "\N{OBJECT REPLACEMENT CHARACTER}end-of-final-message\N{OBJECT REPLACEMENT CHARACTER} "

_PROBE = "what is said here"


@dataclass(frozen=True)
class ChatOptions:
    """What a template may be told beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None  # None: what the template has by default
    template_kwargs: Mapping[str, Any] | None = None


# Fields of a request, which say what a template gets under these names.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class ChatTemplate:
    """A model's templates, compiled once; most models have one, some another for tools."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: SpecialTokens, path: str
    ) -> None:
        """`path` is where the sources came from, for errors."""
        environment = _environment()
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens.named)
        self._templates: dict[str, _Template] = {}
        for name, source in sources.items():
            try:
                template = _Template.compile(environment, source)
            except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
                raise ModelError(f"{path}: chat template {name!r} is broken ({error})") from error
            self._templates[name] = replace(
                template,
                takes_two=self._shows(template, "system", "system", "user") is True,
                loses_later=self._shows(template, "user", "assistant", "system", "user") is False,
            )

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: SpecialTokens) -> Self | None:
        """None where the model has no template: a base model that cannot chat."""
        sources, path = _read_sources(folder)
        return cls(sources, special_tokens, str(path)) if sources else None

    @classmethod
    def from_file(cls, path: Path, special_tokens: SpecialTokens) -> Self:
        return cls({DEFAULT: _read_text(path)}, special_tokens, str(path))

    def render(self, messages: Sequence[Message], options: ChatOptions | None = None) -> str:
        options = options or ChatOptions()
        if not messages:
            raise RequestError("messages", "must hold at least one message")
        if options.continue_final_message and options.add_generation_prompt:
            raise RequestError("continue_final_message", "excludes add_generation_prompt")
        for name in _RESERVED:
            if name in (options.template_kwargs or ()):
                raise RequestError("chat_template_kwargs", f"{name} is a field of its own")
        template = self._choose(options)
        for name, what in (("tools", "them"), ("documents", "them"), ("reasoning_effort", "it")):
            if getattr(options, name) is not None and name not in template.variables:
                raise RequestError(name, f"this model's chat template has no place for {what}")
        as_text = template.adds_arguments
        chat = [prepare(message, arguments_as_text=as_text) for message in messages]
        if not template.knows_developers:
            chat = [by_the_system(message) for message in chat]
        if not template.takes_two or template.loses_later:
            chat = with_one_beginning(chat, of_all=template.loses_later)
        chat = [template.shaped(message) for message in chat]
        if options.continue_final_message:
            return self._render_open(template, chat, options)
        return self._render(template, chat, options)

    def _choose(self, options: ChatOptions) -> "_Template":
        name = TOOL_USE if options.tools is not None and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            known = ", ".join(sorted(self._templates))
            raise RequestError("messages", f"this model has no default chat template, only {known}")
        return self._templates[name]

    def _shows(self, template: "_Template", *roles: str) -> bool | None:
        """What the last but one of them says; None where the template refuses them."""
        chat = [template.shaped({"role": role, "content": f"{role}."}) for role in roles]
        chat[-2] = template.shaped({"role": roles[-2], "content": _PROBE})
        try:
            return _PROBE in self._render(template, chat, ChatOptions())
        except UnprocessableError:
            return None

    def _render(
        self, template: "_Template", chat: list[dict[str, Any]], options: ChatOptions
    ) -> str:
        of_calls = None if template.asks_for_none else ""
        tools = options.tools
        if tools is not None and template.adds_descriptions:
            tools = [with_description(tool) for tool in tools]
        variables = {
            **self._special_tokens,
            **(options.template_kwargs or {}),
            "messages": [with_content(message, of_calls=of_calls) for message in chat],
            "tools": tools,
            "documents": options.documents,
            "add_generation_prompt": options.add_generation_prompt,
        }
        if options.reasoning_effort is not None:
            variables["reasoning_effort"] = options.reasoning_effort
        try:
            return template.compiled.render(variables)
        except Exception as error:
            # The template is the model's code and the messages are the client's: whatever goes
            # wrong between them is told to the client in the template's words.
            reason = str(error) or type(error).__name__
            raise UnprocessableError(
                "messages", f"the chat template refuses them: {reason}"
            ) from error

    def _render_open(
        self, template: "_Template", chat: list[dict[str, Any]], options: ChatOptions
    ) -> str:
        """Everything up to the end of the last message's text, without what would close it."""
        _mark_end(chat[-1])
        before, mark, after = self._render(template, chat, options).rpartition(_END_MARK.rstrip())
        if not mark:
            raise UnprocessableError(
                "continue_final_message", "the chat template leaves the last message out"
            )
        return before if after.startswith(" ") else before.rstrip()


@dataclass(frozen=True)
class _Template:
    compiled: jinja2.Template
    reads_parts: bool  # handles content that is a list of parts; else it must be one string
    reads_text: bool  # handles content that is a string, beside parts
    asks_for_none: bool  # as content of who only calls
    adds_arguments: bool  # of tool calls to texts; else they are objects
    adds_descriptions: bool  # of tools to texts; else there may be none
    has_one_place: bool  # for what a caller of tools says and thinks
    knows_developers: bool  # as a role
    variables: frozenset[str]  # what it reads; the rest would be ignored
    takes_two: bool = True  # messages of the system's, at the beginning
    loses_later: bool = False  # without a word

    @classmethod
    def compile(cls, environment: jinja2.Environment, source: str) -> "_Template":
        tree = environment.parse(source)
        variables = frozenset(node.name for node in tree.find_all(nodes.Name))
        words = {constant.value for constant in tree.find_all(nodes.Const)}
        return cls(
            environment.from_string(source),
            reads_parts(tree),
            asks_for_text(tree),
            asks_for_none=asks_for_none(tree),
            adds_arguments=adds_arguments(tree),
            adds_descriptions=adds_descriptions(tree),
            has_one_place=refuses_thinking_beside_content(tree),
            knows_developers="developer" in words,
            variables=variables,
        )

    def shaped(self, message: dict[str, Any]) -> dict[str, Any]:
        """With its content as the template takes it. Where it takes either, parts are the user's:
        of others' it looks at the first alone, or writes them as Python would."""
        if self.reads_parts and not self.reads_text:
            return split_content(message)
        if self.reads_parts and message.get("role") == "user":
            return message
        message = flatten_content(message)
        return thinking_alone(message) if self.has_one_place else message


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return
    parts = [part for part in content or () if "text" in part]
    if not parts:
        raise RequestError("continue_final_message", "the last message has no text to go on with")
    parts[-1]["text"] += _END_MARK


def _read_sources(folder: Path) -> tuple[dict[str, str], Path]:
    """From files of their own (which win) or tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    files = {DEFAULT: path} if path.is_file() else {}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if files:
        return {name: _read_text(file) for name, file in files.items()}, path
    path = folder / "tokenizer_config.json"
    template = read_json_object(path).get("chat_template") if path.is_file() else None
    if template is None:
        return {}, path
    if isinstance(template, str):
        return {DEFAULT: template}, path
    try:
        return {entry["name"]: str(entry["template"]) for entry in template}, path
    except (KeyError, TypeError) as error:
        raise ModelError(
            f"{path}: chat_template must be a string or a list of named templates"
        ) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; serving writes its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
