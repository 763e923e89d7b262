"""How an API words its answers: what the two have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.openai.generation import ChoicePart, Generation
from cluster.openai.logprobs import TokenSpeller, prompt_logprobs
from engine.request import FinishReason
from engine.step import TokenLogprobs
from engine.text.pieces import Pieces

Json = dict[str, Any]


@dataclass
class WholeChoice:
    """A choice's parts put together, for an answer that is not streamed."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, part: ChoicePart) -> None:
        self.text.append(part.text)
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs or ()
        self.offsets += part.offsets or ()
        self.finish_reason = part.finish_reason
        self.stop_reason = part.stop_reason

    def part(self, choice: int) -> ChoicePart:
        text, ids = "".join(self.text), self.token_ids
        ends = (self.finish_reason, self.stop_reason)
        return ChoicePart(choice, text, ids, self.logprobs, self.offsets, *ends)


class Wording(Protocol):
    """How an API words a choice. A `delta` of nothing but text has the text under one key, so
    that streams can be written without building it anew."""

    id_prefix: str
    object_name: str
    chunk_name: str
    pieces: Pieces  # what tokens show
    is_plain: bool  # a part's text is its delta's, and nothing else is

    def opening(self, generation: Generation, choice: int) -> Json | None:
        """What a stream's choice begins with, before its first part."""
        ...

    def delta(self, part: ChoicePart) -> Json: ...

    def whole(self, generation: Generation, part: ChoicePart) -> Json: ...

    def of_prompt(self, generation: Generation) -> Json:
        """Fields that are the same in all choices of a whole answer to one prompt."""
        ...

    def beside_choices(self, generations: Sequence[Generation]) -> Json:
        """Fields that belong to no choice: of a whole answer, or of a stream's first event."""
        ...

    def beside_usage(self) -> Json:
        """Fields of the usage, of what has been worded so far."""
        ...


def choice_of(choice: int, **content: Any) -> Json:
    """With the keys that every choice has."""
    ends = {"logprobs": None, "finish_reason": None, "stop_reason": None}
    return {"index": choice, **content, **ends}


def prompt_logprobs_of(generation: Generation, speller: TokenSpeller, num_top: int) -> Any:
    report = generation.report
    if report is None or report.logprobs is None:
        return None
    return prompt_logprobs(speller, report.logprobs, num_top)
