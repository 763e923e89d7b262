"""Answers of /v1/chat/completions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.openai.chat_format import ChatFormat, Reading
from cluster.openai.generation import ChoicePart, Generation
from cluster.openai.logprobs import TokenSpeller, chat_logprobs
from cluster.openai.plan import AnswerOptions
from cluster.openai.reading.call_object import ObjectEnd
from cluster.openai.reading.parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reader,
    Reasoning,
)
from cluster.openai.reading.reasoning_tokens import TokenCount
from cluster.openai.wording import Json, choice_of, prompt_logprobs_of
from engine.request import FinishReason


@dataclass(slots=True)
class _Read:
    """What was read of one choice so far."""

    reader: Reader
    reasoning: TokenCount | None
    num_calls: int = 0
    unended: ObjectEnd | None = None  # the last call's arguments, until they end

    def note(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case CallStart():
                    self.num_calls += 1
                    self.unended = ObjectEnd()
                case CallArguments(text=text) if self.unended is not None:
                    if self.unended.find(text) is not None:
                        self.unended = None


class ChatWording:
    """/v1/chat/completions: a message of the assistant's."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, chat_format: ChatFormat, options: AnswerOptions) -> None:
        self._format = chat_format
        self._options = options
        self._reading = options.reading
        self._choices: dict[int, _Read] = {}
        tokenizer = chat_format.tokenizer
        self._speller = TokenSpeller(tokenizer.pieces, as_ids=options.tokens_as_ids)
        skips = options.skip_special_tokens
        self.pieces = chat_format.pieces(self._reading) if skips else tokenizer.pieces
        self.is_plain = self._reading is None
        tells_usage = not options.stream or options.include_usage or options.continuous_usage
        self._counts = tells_usage and chat_format.has_reasoning

    def opening(self, generation: Generation, choice: int) -> Json | None:
        """Without a text where there may be calls alone: some clients begin one with it."""
        may_call = self._reading is not None and self._reading.tools is not None
        return choice_of(choice, delta={"role": "assistant", "content": None if may_call else ""})

    def delta(self, part: ChoicePart) -> Json:
        return self._filled("delta", self._delta_of(self.read(part)), part)

    def whole(self, generation: Generation, part: ChoicePart) -> Json:
        message: Json = {"role": "assistant", "content": part.text, "refusal": None}
        if self._reading is not None:
            message |= self._message_of(self.read(part))
        return self._filled("message", message, part)

    def of_prompt(self, generation: Generation) -> Json:
        return {}

    def beside_choices(self, generations: Sequence[Generation]) -> Json:
        beside: Json = {}
        if self._options.return_token_ids:
            beside["prompt_token_ids"] = list(generations[0].prompt.token_ids)
        num_top = self._options.prompt_logprobs
        if num_top is not None:
            beside["prompt_logprobs"] = prompt_logprobs_of(generations[0], self._speller, num_top)
        return beside

    def beside_usage(self) -> Json:
        if not self._counts:
            return {}
        counts = [choice.reasoning for choice in self._choices.values()]
        num_tokens = sum(count.num_tokens for count in counts if count is not None)
        return {"completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def _begin(self, reading: Reading) -> _Read:
        reasoning = self._format.reasoning_tokens(reading, self.pieces) if self._counts else None
        return _Read(self._format.reader(reading), reasoning)

    def read(self, part: ChoicePart) -> list[Part]:
        """What is new, of what the client wants to see, in the order in which it was written."""
        reading = self._reading
        if reading is None:
            return [Content(part.text)] if part.text else []
        choice = self._choices.get(part.choice)
        if choice is None:
            choice = self._choices[part.choice] = self._begin(reading)
        if choice.reasoning is not None:
            choice.reasoning.push(part.token_ids)
        parts = choice.reader.push(part.text)
        if part.finish_reason is not None:
            parts += choice.reader.finish()
            if choice.reasoning is not None:
                choice.reasoning.finish()
        if not reading.shows_reasoning:
            parts = [one for one in parts if not isinstance(one, Reasoning)]
        if reading.one_call:
            parts = [one for one in parts if getattr(one, "call", 0) == 0]
        choice.note(parts)
        return parts

    def _delta_of(self, parts: Iterable[Part]) -> Json:
        delta: Json = {}
        calls: list[Json] = []
        for part in parts:
            match part:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallStart():
                    calls.append({"index": part.call, **self._call_of(part)})
                case CallArguments(index, text):
                    if not calls or calls[-1]["index"] != index:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _message_of(self, parts: Iterable[Part]) -> Json:
        """`content` is null where there is something else in its place."""
        message = self._delta_of(parts)
        for call in message.get("tool_calls", ()):
            del call["index"]
        return {"content": None if message else "", **message}

    def _call_of(self, start: CallStart) -> Json:
        function = {"name": start.name, "arguments": ""}
        return {"id": self.call_id(start), "type": "function", "function": function}

    def call_id(self, start: CallStart) -> str:
        """A new one, if the model gave it none."""
        assert self._reading is not None
        number = self._reading.num_calls_before + start.call
        return start.id or self._format.new_call_id(start.name, number)

    def logprobs(self, part: ChoicePart) -> Json | None:
        num_top = self._options.logprobs
        if part.logprobs is None or num_top is None:
            return None
        return chat_logprobs(self._speller, part.logprobs, num_top)

    def _filled(self, key: str, message: Json, part: ChoicePart) -> Json:
        choice = choice_of(part.choice, **{key: message})
        choice["finish_reason"], choice["stop_reason"] = part.finish_reason, part.stop_reason
        if part.finish_reason is FinishReason.STOP and self._ends_with_calls(part):
            choice["finish_reason"] = "tool_calls"
        choice["logprobs"] = self.logprobs(part)
        if self._options.return_token_ids:
            choice["token_ids"] = list(part.token_ids)
        return choice

    def _ends_with_calls(self, part: ChoicePart) -> bool:
        """Whose last one was not cut off."""
        read = self._choices.get(part.choice)
        if self._reading is None or read is None:
            return False
        # Who names the function knows already: OpenAI says "stop" then.
        named = self._reading.only_call is not None
        was_cut = part.stop_reason is not None and read.unended is not None
        return read.num_calls > named and not was_cut
