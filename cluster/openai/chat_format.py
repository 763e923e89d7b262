"""How a model's answers in a chat are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cluster.openai.reading.forced import ArrayReader, NamedReader
from cluster.openai.reading.formats import (
    AUTO,
    JsonCalls,
    ToolFormat,
    harmony_format,
    long_id,
    reasoning_format,
    tool_format,
)
from cluster.openai.reading.harmony import Harmony, HarmonyReader, HarmonyTokens, begun_in
from cluster.openai.reading.harmony_messages import MARKS, Message
from cluster.openai.reading.parts import PlainReader, Reader
from cluster.openai.reading.reasoning import Marks, ReasoningReader
from cluster.openai.reading.reasoning_tokens import ReasoningTokens, TokenCount
from cluster.openai.tool_choice import ToolChoice
from engine.errors import RequestError
from engine.grammar.value import Reasoning, Tokens
from engine.text.chat_template import ChatTemplate
from engine.text.pieces import Pieces, pieces_of
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reading:
    """What one request's answers are read for."""

    tools: Mapping[str, Any] | None = None  # parameters by name; None: no calls are looked for
    must_call: bool = False  # by a grammar: the answer is calls, as JSON
    only_call: str | None = None  # of this function, and the answer is its arguments
    one_call: bool = False  # further ones are not shown
    num_calls_before: int = 0  # in the chat
    reasoning_is_open: bool = False  # the prompt began it
    begun: Message | None = None  # of Harmony, in whose text the prompt ends
    shows_reasoning: bool = True

    @property
    def marked_tools(self) -> Mapping[str, Any] | None:
        """Whose calls a model marks: not those of an array that a grammar makes it write."""
        return None if self.must_call and self.only_call is None else self.tools


@dataclass(frozen=True)
class ChatFormat:
    """Another format beside `harmony` is looked for in what that leaves as content."""

    tokenizer: Tokenizer
    tools: ToolFormat | None = None
    reasoning: Marks | None = None
    harmony: Harmony | None = None

    @classmethod
    def choose(
        cls,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> ChatFormat:
        """ "auto": what the template's text tells."""
        sources = () if template is None else tuple(template.sources.values())
        return cls(
            tokenizer,
            tool_format(tool_parser, sources),
            reasoning_format(reasoning_parser, sources),
            harmony_format(tool_parser, reasoning_parser, sources),
        )

    def reading(
        self,
        prompt: str,
        choice: ToolChoice,
        *,
        one_call: bool,
        num_calls_before: int,
        shows_reasoning: bool,
        continued: str = "",
    ) -> Reading | None:
        """None: answers are content and nothing else. `continued` is the message's text that the
        answer goes on with, if it does."""
        tools = choice.parameters
        if not self._has_calls and not choice.must_call:
            tools = None
        if tools is None and self.reasoning is None and self.harmony is None:
            return None
        is_open = self.reasoning is not None and self.reasoning.is_open_in(prompt, continued)
        return Reading(
            tools,
            must_call=choice.must_call,
            only_call=choice.name,
            one_call=one_call,
            num_calls_before=num_calls_before,
            reasoning_is_open=is_open,
            begun=None if self.harmony is None else begun_in(prompt, continued),
            shows_reasoning=shows_reasoning,
        )

    def opening(
        self, prompt: str, choice: ToolChoice, continued: str = ""
    ) -> tuple[Reasoning | None, tuple[Tokens, ...]]:
        """What an answer that must fit a grammar may begin with, and what begins one that is calls
        instead, where the model is free to call. RequestError where reasoning has begun, and
        nobody can tell where that ends."""
        if self.harmony is not None:
            return self.harmony.before_grammar(self.tokenizer, prompt, choice, continued)
        exits: tuple[Tokens, ...] = ()
        if self.tools is not None and choice.tools and not choice.must_call:
            exits = tuple(map(self._tokens, self.tools.beginnings(choice.names)))
        reasoning = self._reasoning_before(prompt, continued)
        if reasoning is not None:
            reasoning = replace(reasoning, exits=exits)
        return reasoning, () if continued else exits

    def entries(
        self, prompt: str, calls: JsonCalls, continued: str
    ) -> tuple[Reasoning | None, tuple[Tokens, ...]]:
        """What stands before calls, wherever in an answer they are, and the reasoning in which it
        says nothing. Models write a line's end behind a mark, or none."""
        with suppress(RequestError):  # of whose end nobody can tell
            reasoning = self._reasoning_before(prompt, continued)
            texts = [mark + behind for mark in calls.marks for behind in ("", "\n")]
            return reasoning, tuple(map(self._tokens, texts))
        return None, ()

    def _reasoning_before(self, prompt: str, continued: str) -> Reasoning | None:
        marks = self.reasoning
        if marks is None:
            return None
        start, end = map(self.tokenizer.token_id, (marks.start, marks.end))
        if marks.is_open_in(prompt, continued):
            if end is None:
                raise RequestError(
                    "grammar",
                    f"the prompt begins the model's reasoning, and {marks.end}, which would end it,"
                    " is no token of its own; turn reasoning off, by chat_template_kwargs where"
                    " the template can",
                )
            return Reasoning(end)
        if start is None or end is None or not marks.may_begin_after(prompt, continued):
            return None
        return Reasoning(end, self._tokens(marks.opening))

    def _tokens(self, text: str) -> Tokens:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def reader(self, reading: Reading) -> Reader:
        reader = self._content_reader(reading)
        if self.reasoning is not None:
            reader = ReasoningReader(self.reasoning, reader, is_open=reading.reasoning_is_open)
        if self.harmony is not None:
            reader = HarmonyReader(self.harmony, reader, reading.marked_tools, reading.begun)
        return reader

    @property
    def has_reasoning(self) -> bool:
        of_harmony = self.harmony is not None and self.harmony.has_reasoning
        return of_harmony or self.reasoning is not None

    @property
    def calls_once(self) -> bool:
        """An answer of Harmony's ends with its call, and templates know of no other behind it."""
        return self.harmony is not None and self.harmony.has_calls

    @property
    def _has_calls(self) -> bool:
        return self.calls_once or self.tools is not None

    def reasoning_tokens(self, reading: Reading, pieces: Pieces) -> TokenCount | None:
        """Counts them in an answer whose tokens show `pieces`."""
        if self.harmony is not None and self.harmony.has_reasoning:
            return HarmonyTokens(self.harmony, pieces, reading.marked_tools, reading.begun)
        if self.reasoning is None:
            return None
        return ReasoningTokens(self.reasoning, pieces, is_open=reading.reasoning_is_open)

    def _content_reader(self, reading: Reading) -> Reader:
        if reading.must_call:
            only = reading.only_call
            return ArrayReader() if only is None else NamedReader(only)
        if self.tools is not None and reading.tools is not None:
            return self.tools.make(reading.tools)
        return PlainReader()

    def pieces(self, reading: Reading | None) -> Pieces:
        """Special tokens show nothing, but for the marks that the reader goes by."""
        if reading is None:
            return self.tokenizer.visible_pieces
        if reading.must_call or reading.tools is None:
            return self._pieces
        return self._pieces_with_tools

    def new_call_id(self, name: str, number: int) -> str:
        return (self.tools.new_id if self.tools else long_id)(name, number)

    @cached_property
    def _pieces(self) -> Pieces:
        return self._showing(self._marks)

    @cached_property
    def _pieces_with_tools(self) -> Pieces:
        return self._showing((*self._marks, *(self.tools.marks if self.tools else ())))

    @property
    def _marks(self) -> Collection[str]:
        return (*(MARKS if self.harmony else ()), *(self.reasoning or ()))

    def _showing(self, marks: Collection[str]) -> Pieces:
        shown = {self.tokenizer.token_id(mark) for mark in marks} & self.tokenizer.special_ids
        if not shown:
            return self.tokenizer.visible_pieces
        backend = self.tokenizer.pieces.tokenizer
        return pieces_of(backend, hidden=self.tokenizer.special_ids - shown)
