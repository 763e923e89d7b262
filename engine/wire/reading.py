"""The other end of `updates`: one request's news, put together again."""

from engine.errors import RequestError
from engine.request import (
    ChoiceDelta,
    FinishReason,
    GenerationUpdate,
    PromptReport,
    PromptTimes,
)
from engine.step import TokenLogprobs
from engine.wire.logprobs import decode_logprobs
from protos import generation_pb2, session_pb2

_LONGEST_S = 1e6
_REASONS = {
    generation_pb2.FINISH_REASON_UNSPECIFIED: None,
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


class NewsReader:
    """Checks the news of one request against what was asked, so that no sender can make it
    keep more than the answer. A RequestError means that the sender does not keep to the wire.
    """

    def __init__(self, num_prompt_tokens: int, num_choices: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_choices = num_choices
        self._prompt_entries: list[TokenLogprobs] = []
        self._prompt_read = False

    def read(self, news: session_pb2.RequestNews) -> GenerationUpdate | None:
        """None while only a part of the prompt's report has come."""
        deltas = [self._delta(delta) for delta in news.deltas]
        prompt = self._prompt(news.prompt) if news.HasField("prompt") else None
        return GenerationUpdate(deltas, prompt) if deltas or prompt is not None else None

    def _delta(self, message: generation_pb2.ChoiceDelta) -> ChoiceDelta:
        choice, token_ids = message.choice, list(message.token_ids)
        if choice >= self._num_choices:
            raise RequestError("choice", f"{choice}, must be below {self._num_choices}")
        logprobs = None
        if message.logprobs:
            logprobs = decode_logprobs(message.logprobs, "logprobs")
            if len(logprobs) != len(token_ids):
                raise RequestError("logprobs", f"{len(logprobs)} for {len(token_ids)} tokens")
        if message.finish_reason not in _REASONS:
            raise RequestError("finish_reason", f"{message.finish_reason} is unknown")
        return ChoiceDelta(
            choice,
            token_ids,
            logprobs,
            _REASONS[message.finish_reason],
            message.stop_token_id if message.HasField("stop_token_id") else None,
        )

    def _prompt(self, message: generation_pb2.PromptReport) -> PromptReport | None:
        if self._prompt_read:
            raise RequestError("prompt", "was reported already")
        self._prompt_entries += decode_logprobs(message.logprobs, "prompt.logprobs")
        wanted = self._num_prompt_tokens - 1 if message.has_logprobs else 0
        have = len(self._prompt_entries)
        if have > wanted or (message.complete and have < wanted):
            raise RequestError("prompt.logprobs", f"{have}, must be {wanted}")
        if not message.complete:
            return None
        self._prompt_read = True
        entries, self._prompt_entries = self._prompt_entries, []
        return PromptReport(
            message.num_cached_tokens,
            [None, *entries] if message.has_logprobs else None,
            _times(message.times) if message.HasField("times") else None,
        )


def _times(message: generation_pb2.PromptTimes) -> PromptTimes:
    return PromptTimes(
        checked_seconds(message.queued_s),
        checked_seconds(message.prefill_s),
        checked_seconds(message.transfer_s),
    )


def checked_seconds(value: float) -> float:
    """For measuring alone, so what makes no sense is as if nothing had been said."""
    return value if 0 <= value <= _LONGEST_S else 0.0
