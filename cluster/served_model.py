"""The model that a server answers for, as far as text and HTTP are concerned."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cluster.openai.chat_format import ChatFormat
from cluster.openai.errors import ApiError, bad_request
from cluster.openai.reading.formats import AUTO
from cluster.openai.structured import NamedGrammar
from engine.errors import RequestError
from engine.generation_defaults import GenerationDefaults
from engine.grammar.trial import GrammarTrial
from engine.text.chat_template import ChatOptions, ChatTemplate, Message
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """`names` are what clients may call it, the first being its own. `vocab_size` is the
    model's (its logits), which the tokenizer's may be short of."""

    names: tuple[str, ...]
    root: str  # where it came from
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    vocab_size: int
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    created: int = field(default_factory=lambda: int(time.time()))
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO

    @cached_property
    def chat_format(self) -> ChatFormat:
        return ChatFormat.choose(
            self.tokenizer, self.chat_template, self.tool_parser, self.reasoning_parser
        )

    @cached_property
    def grammar_trial(self) -> GrammarTrial:
        eos = self.defaults.eos_below(self.vocab_size)
        return GrammarTrial(self.tokenizer.to_json, self.vocab_size, eos)

    async def check_grammar(self, named: NamedGrammar, caller: str = "") -> None:
        """RequestError, naming the field of the part that cannot be compiled, or of the whole."""
        try:
            await self.grammar_trial.check(named.grammar, caller)
        except RequestError as error:
            for part in named.parts:
                await self.check_grammar(part, caller)
            raise error.renamed(named.field) from None

    def check_name(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            message = f"the model {name!r} does not exist; {self.names[0]!r} is served here"
            raise ApiError(404, message, param="model", code="model_not_found")

    def card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvrelay",
            "root": self.root,
            "parent": None,
            "max_model_len": self.max_model_len,
        }

    def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        if self.chat_template is None:
            raise RequestError("messages", "this model has no chat template; use /v1/completions")
        return self.chat_template.render(messages, options)

    def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Text that cannot fit is refused before it is tokenised, which takes a while."""
        least = len(text) // max(1, self.tokenizer.max_token_chars)
        if least > self.max_model_len:
            raise too_long(param, f"at least {least}", self.max_model_len)
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except RequestError as error:
            raise error.renamed(param) from None

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise RequestError(param, f"token {wrong}, must be in 0..{self.vocab_size - 1}")


# By these words, OpenAI's and others', clients know that it is the length: LiteLLM and LangChain
# read the message alone.
_MOST = "this model's maximum context length is {} tokens"


def too_long(param: str, num_tokens: str, max_model_len: int) -> ApiError:
    message = (
        f"{param}: the prompt is too long: {num_tokens} tokens, and {_MOST.format(max_model_len)},"
        " prompt and answer together"
    )
    return bad_request(param, message, "context_length_exceeded")


def no_room(param: str, num_tokens: int, room: int, max_model_len: int) -> ApiError:
    """For an answer that may be longer than what the prompt leaves."""
    message = (
        f"{param}: {num_tokens}, but {_MOST.format(max_model_len)}, and the prompt leaves room for"
        f" {room}"
    )
    return bad_request(param, message, "context_length_exceeded")
