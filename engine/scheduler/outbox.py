"""What a step has for those who asked."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.handoff import FirstToken, PromptChunk, PromptEnd, Reservation
from engine.request import (
    ChoiceDelta,
    FinishReason,
    GenerationUpdate,
    PromptReport,
    PromptTimes,
    RequestId,
)
from engine.scheduler.course import Counts
from engine.scheduler.sequence import RunningRequest, Sequence
from engine.step import TokenLogprobs
from kv_cache.handover import HeldRange

HandOverNews = PromptChunk | PromptEnd


@dataclass(frozen=True, slots=True)
class StepOutput:
    """News by request. A failed request has ended, with all its choices.

    What is in `hand_overs` and `reservations` counts even then: it holds blocks.
    """

    updates: dict[RequestId, GenerationUpdate]
    failures: dict[RequestId, EngineError]
    hand_overs: dict[RequestId, list[HandOverNews]] = field(default_factory=dict)
    reservations: Seq[Reservation] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.updates or self.failures or self.hand_overs or self.reservations)

    def after(self, earlier: "StepOutput") -> "StepOutput":
        """Both in one; `earlier` has no updates."""
        assert not earlier.updates
        hand_overs = dict(earlier.hand_overs)
        for request_id, news in self.hand_overs.items():
            hand_overs[request_id] = hand_overs.get(request_id, []) + news
        return StepOutput(
            self.updates,
            earlier.failures | self.failures,
            hand_overs,
            (*earlier.reservations, *self.reservations),
        )


@dataclass(frozen=True, slots=True)
class End:
    reason: FinishReason
    stop_token_id: int | None = None


def find_end(sequence: Sequence, eos_token_ids: frozenset[int]) -> End | None:
    """Whether the last token ends the sequence."""
    params, request = sequence.params, sequence.request
    token = sequence.tokens[-1]
    num_output = len(sequence.tokens) - request.num_prompt
    old_enough = num_output >= params.min_tokens
    if old_enough and token in request.stop_token_ids:
        return End(FinishReason.STOP, token)
    # too soon it is drawn only where a grammar leaves nothing else
    if token in eos_token_ids and not params.ignore_eos and (old_enough or params.grammar):
        return End(FinishReason.STOP)
    return End(FinishReason.LENGTH) if num_output >= request.max_tokens else None


NOTHING = StepOutput({}, {})


class Outbox:
    """Gathers one step's news; a request that fails takes its deltas with it."""

    def __init__(self, counts: Counts, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._counts = counts
        self.failures: dict[RequestId, EngineError] = {}
        self._deltas: dict[RequestId, list[ChoiceDelta]] = {}
        self._reports: dict[RequestId, PromptReport] = {}
        self._hand_overs: dict[RequestId, list[HandOverNews]] = {}
        self._reservations: list[Reservation] = []

    def take(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, end: End | None
    ) -> None:
        request = sequence.request
        delta = ChoiceDelta(
            sequence.choice,
            [token_id],
            None if logprobs is None else [logprobs],
            None if end is None else end.reason,
            None if end is None else end.stop_token_id,
        )
        self._deltas.setdefault(request.source.request_id, []).append(delta)
        if not request.reported:
            self._report(request)

    def announce(
        self, request: RunningRequest, held: HeldRange, entries: Seq[TokenLogprobs] = ()
    ) -> None:
        if held.end > held.start or entries:
            self._hand_over(request, PromptChunk(held, entries))

    def end_prompt(self, request: RunningRequest, first_tokens: Iterable[FirstToken] = ()) -> None:
        assert request.num_cached is not None
        times = self._count(request)
        self._hand_over(request, PromptEnd(tuple(first_tokens), request.num_cached, times))

    def reserve(self, reservation: Reservation) -> None:
        self._reservations.append(reservation)

    def fail(self, request: RunningRequest, error: EngineError) -> None:
        self.failures[request.source.request_id] = error

    @property
    def is_empty(self) -> bool:
        return not (self._deltas or self.failures or self._hand_overs or self._reservations)

    def output(self) -> StepOutput:
        updates = {
            request_id: GenerationUpdate(deltas, self._reports.get(request_id))
            for request_id, deltas in self._deltas.items()
            if request_id not in self.failures
        }
        return StepOutput(updates, self.failures, self._hand_overs, self._reservations)

    def _hand_over(self, request: RunningRequest, news: HandOverNews) -> None:
        self._hand_overs.setdefault(request.source.request_id, []).append(news)

    def _report(self, request: RunningRequest) -> None:
        wanted = request.reports_prompt_logprobs
        assert request.num_cached is not None
        self._reports[request.source.request_id] = PromptReport(
            request.num_cached,
            tuple(request.prompt_logprobs) if wanted else None,
            self._count(request),
        )
        request.reported = True

    def _count(self, request: RunningRequest) -> PromptTimes:
        """Once for each prompt, at its end."""
        request.course.count(self._counts, request.num_prompt)
        return request.course.times(self.now_s)
