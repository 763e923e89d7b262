"""What a step has for those who asked."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.errors import EngineError
from engine.request import ChoiceDelta, FinishReason, GenerationUpdate, PromptReport, RequestId
from engine.scheduler.sequence import RunningRequest, Sequence
from engine.step import Sample, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepOutput:
    """News by request. A failed request has ended, with all its choices."""

    updates: dict[RequestId, GenerationUpdate]
    failures: dict[RequestId, EngineError]


@dataclass(frozen=True, slots=True)
class End:
    reason: FinishReason
    stop_token_id: int | None = None


def find_end(sequence: Sequence, eos_token_ids: frozenset[int]) -> End | None:
    """Whether the last token ends the sequence."""
    params, request = sequence.params, sequence.request
    token = sequence.tokens[-1]
    num_output = len(sequence.tokens) - request.num_prompt
    if num_output >= params.min_tokens:
        if token in params.stop_token_ids:
            return End(FinishReason.STOP, token)
        if token in eos_token_ids and not params.ignore_eos:
            return End(FinishReason.STOP)
    return End(FinishReason.LENGTH) if num_output >= request.max_tokens else None


class Outbox:
    """Gathers one step's deltas; a request that fails takes its deltas with it."""

    def __init__(self) -> None:
        self.failures: dict[RequestId, EngineError] = {}
        self._deltas: dict[RequestId, list[ChoiceDelta]] = {}
        self._reports: dict[RequestId, PromptReport] = {}

    def take(self, sequence: Sequence, sample: Sample, end: End | None) -> None:
        request = sequence.request
        delta = ChoiceDelta(
            sequence.choice,
            [sample.token_id],
            None if sample.logprobs is None else [sample.logprobs],
            None if end is None else end.reason,
            None if end is None else end.stop_token_id,
        )
        self._deltas.setdefault(request.source.request_id, []).append(delta)
        if not request.reported:
            self._report(request)

    def take_prompt_logprobs(
        self, request: RunningRequest, start: int, entries: Seq[TokenLogprobs]
    ) -> None:
        """`entries` begin with token start + 1; what a preempted request had is skipped."""
        known = len(request.prompt_logprobs) - (start + 1)
        assert known >= 0, "a prompt logprob was left out"
        request.prompt_logprobs += entries[known:]

    def fail(self, request: RunningRequest, error: EngineError) -> None:
        self.failures[request.source.request_id] = error

    def output(self) -> StepOutput:
        updates = {
            request_id: GenerationUpdate(deltas, self._reports.get(request_id))
            for request_id, deltas in self._deltas.items()
            if request_id not in self.failures
        }
        return StepOutput(updates, self.failures)

    def _report(self, request: RunningRequest) -> None:
        wanted = request.source.params.prompt_logprobs is not None
        assert request.num_cached is not None
        self._reports[request.source.request_id] = PromptReport(
            request.num_cached, tuple(request.prompt_logprobs) if wanted else None
        )
        request.reported = True
