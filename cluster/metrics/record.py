"""One request as its ingress sees it go by."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from cluster.backend import RefusedError
from cluster.metrics.requests import RequestMetrics
from cluster.routing_view import placement_fields
from engine.errors import DeadlineError, RequestError
from engine.request import GenerationRequest, GenerationUpdate, PromptReport
from router.ask import Placement

logger = logging.getLogger("kvrelay.requests")

ABORTED, FAILED, STOPPED = "abort", "error", "stop"


class Origin(NamedTuple):
    """The HTTP request that it is a part of; `arrived_s` is of `time.monotonic`."""

    request_id: str
    arrived_s: float


class Legs(NamedTuple):
    """Where the time to the first token went, in seconds."""

    routed: float
    queued: float
    prefill: float
    transfer: float
    first_decode: float  # and the way to the ingress


class RequestRecord:
    """Observes as it goes, and says it all in one line at the end. Times are passed in.

    Knows numbers and ids, and no text: what clients say and are told goes nowhere.
    """

    def __init__(self, request: GenerationRequest, origin: Origin, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._origin = origin
        self._id = request.request_id
        self._num_prompt = len(request.prompt_token_ids)
        self._reasons: dict[int, str | None] = dict.fromkeys(range(request.params.n))
        self._last_s: dict[int, float] = {}  # each choice's last token
        self._first_s: float | None = None
        self._num_output = 0
        self._report: PromptReport | None = None
        self._legs: Legs | None = None
        self._error: str | None = None
        self._is_refused = self._is_late = False
        self._ended = False
        self._num_moves = 0
        self._placement: Placement | None = None
        metrics.num_open.inc()

    def note(self, update: GenerationUpdate, now_s: float, routed_s: float) -> None:
        """`routed_s`: from the arrival until a worker had it."""
        if update.prompt is not None:
            self._report = update.prompt
        by_choice: dict[int, int] = {}  # of which there may be several deltas, merged by waiting
        for choice, token_ids, _, reason, _ in update.deltas:
            if token_ids:
                by_choice[choice] = by_choice.get(choice, 0) + len(token_ids)
            if reason is not None and self._reasons[choice] is None:
                self._reasons[choice] = reason.value
        for choice, count in by_choice.items():
            self._note_tokens(choice, count, now_s)
        if num_tokens := sum(by_choice.values()):
            self._num_output += num_tokens
            self._metrics.generation_tokens.inc(num_tokens)
            if self._first_s is None:
                self._note_first(now_s, routed_s)

    def _note_tokens(self, choice: int, num_tokens: int, now_s: float) -> None:
        """Those that come at once are as far apart as they were made, on average."""
        before_s = self._last_s.get(choice)
        self._last_s[choice] = now_s
        if before_s is not None:
            for _ in range(num_tokens):
                self._metrics.inter_token_s.observe((now_s - before_s) / num_tokens)

    def _note_first(self, now_s: float, routed_s: float) -> None:
        self._first_s = now_s
        self._metrics.prompt_tokens.inc(self._num_prompt)
        total_s = now_s - self._origin.arrived_s
        self._metrics.first_token_s.observe(total_s)
        if self._report is None or self._report.times is None:
            return
        queued_s, prefill_s, transfer_s = self._report.times
        rest_s = total_s - routed_s - queued_s - prefill_s - transfer_s
        self._legs = Legs(routed_s, queued_s, prefill_s, transfer_s, max(0.0, rest_s))
        for leg, seconds in self._legs._asdict().items():
            self._metrics.legs[leg].observe(seconds)
        self._metrics.queued_s.observe(queued_s)
        self._metrics.prefill_s.observe(prefill_s)

    def stop(self, choice: int) -> None:
        """A stop string was found in its text."""
        if self._reasons[choice] is None:
            self._reasons[choice] = STOPPED

    def fail(self, error: Exception) -> None:
        """By an error of the HTTP request that it is a part of, which the first one ends. Only what
        kind of error it was: its words may quote what a client sent. What is refused is no answer,
        whoever noticed and when."""
        if self._error is not None or None not in self._reasons.values():
            return
        self._error = type(error).__name__
        self._is_refused = self._first_s is None and isinstance(error, (RequestError, RefusedError))
        self._is_late = isinstance(error, DeadlineError)

    def note_route(self, num_moves: int, placement: Placement | None) -> None:
        """`num_moves`: from one worker to another; `placement`: the last one."""
        self._num_moves, self._placement = num_moves, placement

    def end(self, now_s: float) -> None:
        """Idempotent."""
        if self._ended:
            return
        self._ended = True
        unfinished = ABORTED if self._error is None or self._is_late else FAILED
        reasons = [reason or unfinished for reason in self._reasons.values()]
        self._metrics.num_open.dec()
        if not self._is_refused:
            self._note_end(now_s, reasons)
        if logger.isEnabledFor(logging.INFO):
            logger.info("finished", extra={"fields": self._fields(now_s, reasons)})

    def _note_end(self, now_s: float, reasons: list[str]) -> None:
        metrics = self._metrics
        for reason in reasons:
            metrics.ended.labels(reason).inc()
        metrics.prompt_length.observe(self._num_prompt)
        if self._first_s is None:  # it failed soon, and is no short answer
            metrics.prompt_tokens.inc(self._num_prompt)
            return
        metrics.whole_s.observe(now_s - self._origin.arrived_s)
        metrics.answer_length.observe(self._num_output)
        metrics.decode_s.observe(max(self._last_s.values()) - self._first_s)

    def _fields(self, now_s: float, reasons: list[str]) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request_id": self._origin.request_id,
            "id": self._id,
            "finish_reasons": reasons,
            "prompt_tokens": self._num_prompt,
            "cached_tokens": self._report.num_cached_tokens if self._report else None,
            "output_tokens": self._num_output,
            "e2e_s": round(now_s - self._origin.arrived_s, 6),
            "reroutes": self._num_moves,
        }
        if self._placement is not None:
            fields["route"] = placement_fields(self._placement)
        if self._first_s is not None:
            fields["ttft_s"] = round(self._first_s - self._origin.arrived_s, 6)
        if self._legs is not None:
            fields["legs_s"] = {leg: round(s, 6) for leg, s in self._legs._asdict().items()}
        if self._error is not None:
            fields["error"] = self._error
        return fields
