"""The answer to a gRPC client: updates as messages small enough, or all of them as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.request import ChoiceDelta, FinishReason, GenerationUpdate, PromptReport
from engine.step import TokenLogprobs
from engine.wire.updates import UpdatePart, fill, split, update_bytes
from protos.ingress_pb2 import GenerateUpdate
from protos.limits import PART_BYTES


def messages(update: GenerationUpdate) -> Iterator[GenerateUpdate]:
    if update_bytes(update) <= PART_BYTES:
        yield _message(UpdatePart(update.deltas, update.prompt))
        return
    for part in split(update, PART_BYTES):
        yield _message(part)


class WholeAnswer:
    """Updates, put together."""

    def __init__(self, num_choices: int) -> None:
        self._choices = [_Choice() for _ in range(num_choices)]
        self._prompt: PromptReport | None = None

    def add(self, update: GenerationUpdate) -> None:
        self._prompt = self._prompt or update.prompt
        for delta in update.deltas:
            self._choices[delta.choice].add(delta)

    def message(self) -> GenerateUpdate:
        deltas = [choice.delta(number) for number, choice in enumerate(self._choices)]
        return _message(UpdatePart(deltas, self._prompt))


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_token_id = delta.stop_token_id

    def delta(self, number: int) -> ChoiceDelta:
        return ChoiceDelta(
            number, self.token_ids, self.logprobs, self.finish_reason, self.stop_token_id
        )


def _message(part: UpdatePart) -> GenerateUpdate:
    message = GenerateUpdate()
    fill(message, part)
    return message
