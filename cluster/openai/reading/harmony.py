"""Reasoning, content and calls of an answer in Harmony: of each message its channel tells, or whom
it is to."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cluster.openai.reading.harmony_messages import (
    CHANNEL,
    CONSTRAIN,
    END,
    MAX_HEADER_CHARS,
    MESSAGE,
    START,
    HarmonyMessages,
    Message,
    Span,
)
from cluster.openai.reading.parts import CallArguments, CallStart, Part, Reader, Reasoning
from cluster.openai.tool_choice import ToolChoice
from engine.grammar.value import Reasoning as GrammarReasoning
from engine.grammar.value import Tokens
from engine.text.pieces import Pieces
from engine.text.tokenizer import Tokenizer

_FUNCTIONS = "functions."
# The point may begin the token of a name.
_TO_FUNCTIONS = (f"{CHANNEL}commentary to=functions", " to=functions")
_ANALYSIS, _FINAL = "analysis", "final"
_BETWEEN_MESSAGES = "\n\n"


@dataclass(frozen=True, slots=True)
class Harmony:
    """What is told apart of it; the rest is content. `tools` None: no calls are looked for."""

    has_calls: bool = True
    has_reasoning: bool = True

    def called(self, message: Message, tools: Collection[str] | None) -> str | None:
        """The function that a message calls. Models leave out the name's beginning at times."""
        if not self.has_calls or tools is None or message.channel == _FINAL:
            return None
        name = message.to.removeprefix(_FUNCTIONS)
        return name if name in tools or (name and name != message.to) else None

    def is_reasoning(self, message: Message, tools: Collection[str] | None) -> bool:
        is_analysis = self.has_reasoning and message.channel == _ANALYSIS
        return is_analysis and self.called(message, tools) is None

    def before_grammar(
        self, tokenizer: Tokenizer, prompt: str, choice: ToolChoice, continued: str
    ) -> tuple[GrammarReasoning | None, tuple[Tokens, ...]]:
        """What stands before a text that must fit: analysis, and the header of the message that
        the text is, which is to a function if that must be called. And the headers of messages to
        functions that may be."""
        marks = (START, CHANNEL, MESSAGE, CONSTRAIN, END)
        begun = begun_in(prompt, continued)
        in_text = begun is not None and begun.channel != _ANALYSIS
        if in_text or not self.has_reasoning or None in map(tokenizer.token_id, marks):
            return None, ()
        function = choice.name if self.has_calls else None
        end = tokenizer.token_id(END)
        assert end is not None
        channel = (
            _FINAL if function is None else f"commentary to={_FUNCTIONS}{function} {CONSTRAIN}json"
        )
        role, header = f"{START}assistant", f"{CHANNEL}{channel}{MESSAGE}"

        def tokens(text: str) -> Tokens:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        may_call = self.has_calls and choice.tools and not choice.must_call

        def to_functions(before: str) -> tuple[Tokens, ...]:
            return tuple(tokens(before + header) for header in _TO_FUNCTIONS) if may_call else ()

        then = tokens(role + header)
        if begun is not None:
            return GrammarReasoning(end, then=then, exits=to_functions(role)), ()
        missing = "" if prompt.endswith(role) else role
        start = tokens(f"{missing}{CHANNEL}{_ANALYSIS}{MESSAGE}")
        reasoning = GrammarReasoning(end, start, then, tokens(missing + header), to_functions(role))
        return reasoning, to_functions(missing)


def begun_in(prompt: str, continued: str = "") -> Message | None:
    """The message in whose text the answer begins: the final one where it goes on with an earlier
    one's text, or one whose header the prompt ends with."""
    if continued:
        return Message(channel=_FINAL)
    header = prompt[prompt.rfind(START) :][:MAX_HEADER_CHARS].rstrip()
    if not (header.startswith(START) and header.endswith(MESSAGE)):
        return None
    return HarmonyMessages(None).push(header)[-1].message


class HarmonyReader:
    """Messages of one kind have an empty line between them. No white space is left out: marks
    tell where each message begins and ends."""

    def __init__(
        self,
        harmony: Harmony,
        content: Reader,
        tools: Collection[str] | None,
        begun: Message | None,
    ) -> None:
        """`begun` is a message in whose text the prompt ends."""
        self._harmony = harmony
        self._content = content
        self._tools = tools
        self._messages = HarmonyMessages(begun)
        self._num_calls = 0
        self._in_call = False
        self._last: dict[bool, int] = {}  # message with text, of reasoning and of content

    def push(self, text: str) -> list[Part]:
        return self._read(self._messages.push(text))

    def finish(self) -> list[Part]:
        return self._read(self._messages.finish()) + self._content.finish()

    def _read(self, spans: Sequence[Span]) -> list[Part]:
        parts: list[Part] = []
        for text, message in spans:
            if message is None:
                continue
            if not text:
                self._begin(message, parts)
            elif self._in_call:
                parts.append(CallArguments(self._num_calls - 1, text))
            else:
                self._say(text, message, parts)
        return parts

    def _begin(self, message: Message, parts: list[Part]) -> None:
        name = self._harmony.called(message, self._tools)
        self._in_call = name is not None
        if name is not None:
            parts.append(CallStart(self._num_calls, name))
            self._num_calls += 1

    def _say(self, text: str, message: Message, parts: list[Part]) -> None:
        is_reasoning = self._harmony.is_reasoning(message, self._tools)
        if self._last.setdefault(is_reasoning, message.number) != message.number:
            text = _BETWEEN_MESSAGES + text
            self._last[is_reasoning] = message.number
        parts += [Reasoning(text)] if is_reasoning else self._content.push(text)


class HarmonyTokens:
    """Counts the tokens with text of reasoning, as they come. White space there counts; tokens of
    nothing but marks and headers, or without text, do not. Goes by bytes, as characters."""

    def __init__(
        self,
        harmony: Harmony,
        pieces: Pieces,
        tools: Collection[str] | None,
        begun: Message | None,
    ) -> None:
        self.num_tokens = 0
        self._harmony = harmony
        self._pieces = pieces
        self._tools = tools
        self._messages = HarmonyMessages(begun)
        self._tokens: deque[tuple[int, int]] = deque()  # where they begin and end, not judged yet
        self._num_bytes = self._num_judged = 0

    def push(self, token_ids: Sequence[int]) -> None:
        tokens = [*filter(None, map(self._pieces.token_bytes, token_ids))]
        for token in tokens:
            begin, self._num_bytes = self._num_bytes, self._num_bytes + len(token)
            self._tokens.append((begin, self._num_bytes))
        self._judge(self._messages.push(b"".join(tokens).decode("latin-1")))

    def finish(self) -> None:
        self._judge(self._messages.finish())

    def _judge(self, spans: Sequence[Span]) -> None:
        tokens = self._tokens
        for text, message in spans:
            self._num_judged += len(text)
            if text and message is not None and self._harmony.is_reasoning(message, self._tools):
                while tokens and tokens[0][0] < self._num_judged:
                    self.num_tokens += 1
                    tokens.popleft()
            while tokens and tokens[0][1] <= self._num_judged:
                tokens.popleft()
