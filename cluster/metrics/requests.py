"""What an ingress observes of the requests that it answers."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.metrics.names import FIRST_TOKEN_S, INTER_TOKEN_S, PREFIX, REQUEST_S, token_bounds

LEGS = ("routed", "queued", "prefill", "transfer", "first_decode")


class RequestMetrics:
    """One process's; on a registry of its own. An observation takes about a microsecond."""

    def __init__(self, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        tokens = token_bounds(max_model_len)
        self.num_open = Gauge(
            f"{PREFIX}num_requests_open", "Requests under way.", registry=self.registry
        )
        self.http = self._counter(
            "http_requests", "Answers over HTTP, by their status.", ["path", "status"]
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self.ended = self._counter(
            "request_success", "Answers, by how they ended.", ["finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            self.ended.labels(reason)
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S
        )
        legs = self._histogram(
            "time_to_first_token_leg_seconds",
            "The legs of the time to the first token, which they add up to.",
            FIRST_TOKEN_S,
            ["leg"],
        )
        self.legs = {leg: legs.labels(leg) for leg in LEGS}
        self.inter_token_s = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer.", INTER_TOKEN_S
        )
        self.whole_s = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", REQUEST_S
        )
        self.queued_s = self._histogram(
            "request_queue_time_seconds", "A prompt's wait at workers.", REQUEST_S
        )
        self.prefill_s = self._histogram(
            "request_prefill_time_seconds", "A prompt's computation.", REQUEST_S
        )
        self.decode_s = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_S
        )
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Tokens of a request's prompt.", tokens
        )
        self.answer_length = self._histogram(
            "request_generation_tokens", "Tokens of a request's answers.", tokens
        )

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(PREFIX + name, text, labels, registry=self.registry, buckets=bounds)
