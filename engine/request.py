"""What passes between whoever serves a request and whatever generates for it.

Plain values without torch: the HTTP side makes the request and reads the updates, an engine in
the same process or a worker behind a stream answers them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from engine.grammar.value import Grammar
from engine.sampling import SamplingParams
from engine.step import TokenLogprobs

RequestId = NewType("RequestId", str)


class FinishReason(StrEnum):
    """How a choice ended. A failure is no reason: the request's stream raises it."""

    STOP = "stop"  # an end-of-sequence or stop token; the serving side adds stop strings
    LENGTH = "length"  # max_tokens, or the model's length


@dataclass(frozen=True, slots=True)
class HandOver:
    """The prompt is computed for another engine, which answers it.

    Its cache is announced from `first_token`, a block's first, to the prompt's end. With `draw`
    the first token of every choice is drawn, without it the reader draws for itself.
    """

    first_token: int = 0
    draw: bool = True


class RemotePrefix(NamedTuple):
    """The cache of the prompt's first `num_tokens`, whole blocks, may be had from elsewhere.

    It is fetched where more than `above` of these tokens are not cached here.
    """

    num_tokens: int
    above: int = 0


class ChoiceSoFar(NamedTuple):
    """What the client has of a choice already."""

    token_ids: Sequence[int]
    finished: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and what is asked of it, in token ids alone.

    `priority` orders waiting requests where the policy is `priority`: lower is sooner.
    `cache_salt` separates tenants in the prefix cache. `tenant`: whose share of a cluster it takes;
    no engine asks. `timeout_s` counts from submission; then the request ends with a DeadlineError,
    wherever it is.

    `hand_over`: another engine answers the prompt; `fetch_above` and `sent` do not go with it.
    `fetch_above`: another engine may compute the prompt if more tokens than so many are cached
    neither here nor in the `prefix`. `sent`: another engine began to answer; one entry a choice.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    hand_over: HandOver | None = None
    fetch_above: int | None = None
    prefix: RemotePrefix | None = None
    sent: tuple[ChoiceSoFar, ...] = ()
    tenant: str = ""

    @property
    def drawn_grammar(self) -> Grammar | None:
        """That of the tokens that are drawn for it where it is."""
        draws = self.hand_over is None or self.hand_over.draw
        return self.params.grammar if draws else None


class PromptTimes(NamedTuple):
    """Where a request's time went before its first token, in seconds: in queues, in computing the
    prompt wherever that was, and in transfers that this did not hide."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0


class PromptReport(NamedTuple):
    """What reading the prompt told. `num_cached_tokens` were computed by nobody for this request,
    here or on another engine. `logprobs` has one entry per prompt token, the first None;
    it is None where the request did not ask, or went on from tokens that were sent."""

    num_cached_tokens: int
    logprobs: Sequence[TokenLogprobs | None] | None = None
    times: PromptTimes | None = None


class ChoiceDelta(NamedTuple):
    """New tokens of one choice, in order; the last delta of a choice has its `finish_reason`.

    The token that ended the choice is the last of `token_ids`. `stop_token_id` is set when it
    was one of the request's own `stop_token_ids`, not when it was the model's end of sequence.
    `logprobs` has an entry per token where the request asked for them.
    """

    choice: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class GenerationUpdate(NamedTuple):
    """News of a request since the last update: of one step, or of several for a slow reader.

    `prompt` is set in the first update and in no other.
    """

    deltas: Sequence[ChoiceDelta]
    prompt: PromptReport | None = None
